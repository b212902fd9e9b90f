#include "services/simulate/disaggregation.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "services/common/quantities.h"
#include "services/simulate/agent_traffic.h"
#include "services/simulate/chat_traffic.h"
#include "services/simulate/document_traffic.h"
#include "services/simulate/mixed_traffic.h"
#include "services/simulate/report.h"

namespace deltamesh {
namespace {

using nlohmann::ordered_json;

constexpr double kFastLink = 50e9, kSlowLink = 3e9;  // 400 and 25 Gbit/s
constexpr const char* kFigures[] = {"ttft_mean", "ttft_p90", "completion_mean", "completion_p90"};
constexpr Disaggregation kWays[] = {Disaggregation::kPlanned, Disaggregation::kAlways,
                                    Disaggregation::kNever};

// What a second of each kind brings, chosen for four prefill and four decode workers of the default rates:
// light loads leave them idle mostly, under busy ones the prompts fill most of a role's time when it computes
// them alone.
struct Load {
  const char* name;
  double documents_a_second, agents, chats_a_second;
};
constexpr Load kLoads[] = {{"light", 1.0, 60, 1.5}, {"busy", 2.7, 300, 7}};
constexpr double kDocumentSeconds = 1200, kAgentSeconds = 2400, kChatSeconds = 600;

struct Case {
  std::string workload, load;
  std::function<std::unique_ptr<Traffic>()> traffic;
};

std::vector<Case> Cases(uint64_t seed, double scale, double workers) {
  std::vector<Case> cases;
  for (const Load& load : kLoads) {
    const auto documents = [=]() -> std::unique_ptr<Traffic> {
      const double rate = load.documents_a_second * workers;
      const double count = std::max(1.0, rate * kDocumentSeconds * scale);
      return std::make_unique<DocumentTraffic>(
          DocumentTrafficOptions{.seed = seed,
                                 .requests = std::llround(count),
                                 .requests_per_second = rate,
                                 .unique = true});
    };
    const auto agents = [=]() -> std::unique_ptr<Traffic> {
      return std::make_unique<AgentTraffic>(AgentTrafficOptions{
          .seed = seed + 1,
          .sessions = std::llround(std::max(1.0, load.agents * workers * scale)),
          .day_seconds = kAgentSeconds * scale});
    };
    const auto chats = [=]() -> std::unique_ptr<Traffic> {
      const double rate = load.chats_a_second * workers;
      return std::make_unique<ChatTraffic>(
          ChatTrafficOptions{.seed = seed + 2,
                             .chats = std::llround(std::max(1.0, rate * kChatSeconds * scale)),
                             .seconds = kChatSeconds * scale});
    };
    cases.push_back({"unique", load.name, documents});
    cases.push_back({"agents", load.name, agents});
    cases.push_back({"chats", load.name, chats});
  }
  return cases;
}

ordered_json RowOf(Disaggregation way, const MeshRunResult& r) {
  const ordered_json first = LatencyJson(r.first_token), completion = LatencyJson(r.completion);
  const ordered_json gap = LatencyJson(r.token_gap);
  return {{"disaggregation", DisaggregationName(way)},
          {"requests", r.requests},
          {"failed", r.failed},
          {"failures", FailuresJson(r.failures)},
          {"ttft_mean", first["mean"]},
          {"ttft_p90", first["p90"]},
          {"completion_mean", completion["mean"]},
          {"completion_p90", completion["p90"]},
          {"token_gap_mean", gap["mean"]},
          {"token_gap_p90", gap["p90"]},
          {"handoffs", r.handoffs},
          {"fetches", r.fetches},
          {"moved_bytes", r.moved_bytes},
          {"placed_append", r.placed_append},
          {"placed_alone", r.placed_alone},
          {"computed_tokens", r.computed_tokens},
          {"prefill_busy_share", r.prefill_busy},
          {"decode_busy_share", r.decode_busy},
          {"simulated_seconds", r.last_second}};
}

bool HasFigures(const ordered_json& row) {
  return std::ranges::none_of(kFigures, [&](const char* f) { return row[f].is_null(); });
}

// What the planner's figures are of the others', and to whom it loses. Who answered nothing is no rival, and
// a planner that answered nothing loses to who did.
ordered_json Verdict(const ordered_json& rows) {
  ordered_json verdict;
  const ordered_json& planned = rows[0];
  bool loses = false;
  for (size_t i = 1; i < rows.size(); ++i) {
    ordered_json against;
    if (!HasFigures(planned) || !HasFigures(rows[i])) {
      for (const char* figure : kFigures) against[figure] = nullptr;
      against["all"] = nullptr;
      against["loses"] = !HasFigures(planned) && HasFigures(rows[i]);
      loses = loses || against["loses"].get<bool>();
      verdict["to_" + rows[i]["disaggregation"].get<std::string>()] = std::move(against);
      continue;
    }
    double product = 1;
    for (const char* figure : kFigures) {
      const double ratio = planned[figure].get<double>() / rows[i][figure].get<double>();
      against[figure] = ratio;
      product *= ratio;
    }
    const double mean = std::pow(product, 1.0 / std::size(kFigures));
    against["all"] = mean;
    against["loses"] = mean > 1 + kDisaggregationSlack;
    loses = loses || mean > 1 + kDisaggregationSlack;
    verdict["to_" + rows[i]["disaggregation"].get<std::string>()] = std::move(against);
  }
  verdict["loses"] = loses;
  return verdict;
}

}  // namespace

absl::StatusOr<ordered_json> CompareDisaggregation(const DisaggregationOptions& options,
                                                   const DisaggregationProgress& progress) {
  SimulationOptions o = options.base;
  RETURN_IF_ERROR(CheckSimulation(o));
  if (o.prefill_workers < 1 || o.decode_workers < 1) {
    return InvalidArgument("prefill-workers %d, decode-workers %d: use at least 1 of both",
                           o.prefill_workers, o.decode_workers);
  }
  RETURN_IF_ERROR(CheckNumber(kScaleRange, options.scale));
  ASSIGN_OR_RETURN(const CacheBytes bytes, CacheBytesOf(o));
  ASSIGN_OR_RETURN(const CachePolicy policy, PolicyNamed("ours"));
  ordered_json document = {{"model", o.config.empty() ? "Kimi K3" : o.config},
                           {"snapshot_bytes", bytes.snapshot},
                           {"block_bytes", bytes.block},
                           {"seed", o.seed},
                           {"scale", options.scale},
                           {"cache_bytes", o.cache_bytes},
                           {"prefill_workers", o.prefill_workers},
                           {"decode_workers", o.decode_workers},
                           {"prompt_tokens_per_second", o.rates.prompt_tokens_per_second},
                           {"step_seconds", o.rates.step_seconds},
                           {"token_seconds", o.rates.token_seconds},
                           {"slack", kDisaggregationSlack}};
  ordered_json cases = ordered_json::array();
  const double workers = static_cast<double>(o.prefill_workers) / 4;
  for (const Case& c : Cases(o.seed, options.scale, workers)) {
    for (const double link : {kFastLink, kSlowLink}) {
      o.link_bytes_per_second = link;
      ordered_json rows = ordered_json::array();
      for (const Disaggregation way : kWays) {
        MeshRunOptions mesh = MeshOf(o, policy, bytes);
        mesh.disaggregation = way;
        const std::unique_ptr<Traffic> traffic = c.traffic();
        ASSIGN_OR_RETURN(const MeshRunResult result, RunMesh(*traffic, mesh));
        rows.push_back(RowOf(way, result));
        if (progress) {
          progress(absl::StrFormat("%s, %s, %g GB/s, %s", c.workload, c.load, link / 1e9,
                                   DisaggregationName(way)),
                   result.requests);
        }
      }
      ordered_json verdict = Verdict(rows);
      cases.push_back({{"workload", c.workload},
                       {"load", c.load},
                       {"link_bytes_per_second", link},
                       {"rows", std::move(rows)},
                       {"planned", std::move(verdict)}});
    }
  }
  document["cases"] = std::move(cases);
  return document;
}

void PrintDisaggregation(const ordered_json& d, std::ostream& out) {
  out << absl::StrFormat(
      "%s: %d prefill and %d decode workers, %s prompt tokens a second each, seed %d\n\n",
      d["model"].get<std::string>(), d["prefill_workers"].get<int64_t>(),
      d["decode_workers"].get<int64_t>(),
      Grouped(static_cast<int64_t>(d["prompt_tokens_per_second"].get<double>())),
      d["seed"].get<uint64_t>());
  out << absl::StrFormat("%-8s %-6s %8s  %-8s %9s %9s %9s %9s %9s %9s %9s %7s\n", "traffic", "load",
                         "link", "handed", "ttft mean", "p90", "done mean", "p90", "gap mean",
                         "gap p90", "hand-offs", "failed");
  int64_t lost = 0;
  for (const ordered_json& c : d["cases"]) {
    for (const ordered_json& row : c["rows"]) {
      const auto time = [&](const char* key) { return TimeText(row[key]); };
      out << absl::StrFormat(
          "%-8s %-6s %5g GB/s  %-8s %9s %9s %9s %9s %9s %9s %9s %7s\n",
          c["workload"].get<std::string>(), c["load"].get<std::string>(),
          c["link_bytes_per_second"].get<double>() / 1e9, row["disaggregation"].get<std::string>(),
          time("ttft_mean"), time("ttft_p90"), time("completion_mean"), time("completion_p90"),
          time("token_gap_mean"), time("token_gap_p90"), Grouped(row["handoffs"].get<int64_t>()),
          Grouped(row["failed"].get<int64_t>()));
    }
    for (const auto& [key, against] : c["planned"].items()) {
      if (!key.starts_with("to_")) continue;
      const auto ratio = [&](const char* f) {
        return against[f].is_null() ? "-" : absl::StrFormat("%.3f", against[f].get<double>());
      };
      out << absl::StrFormat("%27s planned / %-8s %6s %9s %9s %9s   together %s%s\n", "",
                             key.substr(3), ratio("ttft_mean"), ratio("ttft_p90"),
                             ratio("completion_mean"), ratio("completion_p90"), ratio("all"),
                             against["loses"].get<bool>() ? "  LOSES" : "");
    }
    lost += c["planned"]["loses"].get<bool>();
  }
  out << absl::StrFormat(
      "\nthe planner loses in %d of %d cases (together: the geometric mean of the four ratios, "
      "more "
      "than %g above 1)\n",
      lost, d["cases"].size(), d["slack"].get<double>());
}

}  // namespace deltamesh
