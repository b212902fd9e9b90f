#include "services/cli/bench_disaggregation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/cache/state_layout.h"
#include "services/cli/bench_rows.h"
#include "services/cli/bench_turns.h"
#include "services/cli/byte_text.h"
#include "services/cli/local_mesh.h"
#include "services/cli/random_model.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kLongest = absl::Minutes(5);  // for one request
constexpr std::array<const char*, 3> kWays = {"planned", "always", "never"};
constexpr std::array<const char*, 4> kFigures = {"ttft_mean", "ttft_p90", "completion_mean",
                                                 "completion_p90"};
// The planner loses when its figures are together more than this above another way's, and more than they
// differ from round to round.
constexpr double kSlack = 0.05;

using Figures = std::array<double, 4>;

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

double Percentile90(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[(values.size() * 9 - 1) / 10];
}

Figures FiguresOf(const std::vector<SeenTurn>& turns) {
  std::vector<double> first, last;
  for (const SeenTurn& t : turns) {
    first.push_back(t.first_token);
    last.push_back(t.last_token);
  }
  return {Mean(first), Percentile90(first), Mean(last), Percentile90(last)};
}

// What one client does in a round; `number` tells it from all others.
using Script =
    std::function<absl::StatusOr<std::vector<SeenTurn>>(const TurnClient& client, uint64_t number)>;
struct Workload {
  const char* name;
  Script script;
};

class Comparison {
 public:
  explicit Comparison(const DisaggregationBenchOptions& options) : o_(options) {
    workloads_ = {{"documents", [this](const TurnClient& c,
                                       uint64_t n) { return Prompts(c, n, o_.document_tokens); }},
                  {"agents", [this](const TurnClient& c, uint64_t n) { return Agent(c, n); }},
                  {"chats", [this](const TurnClient& c, uint64_t n) {
                     return Prompts(c, n, o_.chat_tokens);
                   }}};
  }

  absl::Status Run(const std::string& model);
  nlohmann::ordered_json Json() const;

 private:
  struct Mesh {
    std::unique_ptr<LocalMesh> mesh;
    std::unique_ptr<TurnClient> client;
  };

  absl::StatusOr<Mesh> Start(const std::string& model, const std::string& way) const;
  absl::StatusOr<std::vector<SeenTurn>> Prompts(const TurnClient& client, uint64_t number,
                                                int64_t tokens) const;
  absl::StatusOr<std::vector<SeenTurn>> Agent(const TurnClient& client, uint64_t number) const;
  // All clients at once.
  absl::StatusOr<std::vector<SeenTurn>> Round(const TurnClient& client, const Workload& workload,
                                              uint64_t number) const;

  const DisaggregationBenchOptions& o_;
  std::vector<Workload> workloads_;
  std::map<std::pair<std::string, std::string>, std::vector<Figures>> rounds_;  // workload, way
  std::map<std::pair<std::string, std::string>, int64_t> handed_over_, asked_;
};

absl::StatusOr<Comparison::Mesh> Comparison::Start(const std::string& model,
                                                   const std::string& way) const {
  const int64_t context = std::max(o_.document_tokens, o_.agent_tokens) +
                          (o_.turns + 1) * (o_.append_tokens + o_.answer_tokens) + 128;
  LocalMeshOptions o;
  o.model = model;
  o.threads = o_.threads;
  o.experts = 0;
  o.flags = {"--router-flag=--disaggregate=" + way,
             absl::StrFormat("--worker-flag=--context-tokens=%d", context),
             absl::StrFormat("--worker-flag=--latent-blocks=%d",
                             16 * o_.clients * (context / kBlockTokens + 2))};
  Mesh out;
  ASSIGN_OR_RETURN(out.mesh, LocalMesh::Start(o));
  out.client = std::make_unique<TurnClient>(out.mesh->router(), kLongest);
  RETURN_IF_ERROR(out.client->Open());
  return out;
}

absl::StatusOr<std::vector<SeenTurn>> Comparison::Prompts(const TurnClient& client, uint64_t number,
                                                          int64_t tokens) const {
  std::vector<SeenTurn> seen;
  for (int64_t t = 0; t < o_.turns; ++t) {
    const auto prompt = BenchPrompt(number << 8 | static_cast<uint64_t>(t), tokens, client.vocab());
    ASSIGN_OR_RETURN(SeenTurn turn, client.Ask(prompt, o_.answer_tokens));
    seen.push_back(std::move(turn));
  }
  return seen;
}

// Its first prompt is the work of documents and not counted.
absl::StatusOr<std::vector<SeenTurn>> Comparison::Agent(const TurnClient& client,
                                                        uint64_t number) const {
  std::vector<SeenTurn> seen;
  std::vector<TokenId> text = BenchPrompt(number << 8, o_.agent_tokens, client.vocab());
  for (int64_t t = 0; t <= o_.turns; ++t) {
    ASSIGN_OR_RETURN(SeenTurn turn, client.Ask(text, o_.answer_tokens));
    text.insert(text.end(), turn.answer.begin(), turn.answer.end());
    const auto more =
        BenchPrompt(number << 8 | static_cast<uint64_t>(t + 1), o_.append_tokens, client.vocab());
    text.insert(text.end(), more.begin(), more.end());
    if (t > 0) seen.push_back(std::move(turn));
  }
  return seen;
}

absl::StatusOr<std::vector<SeenTurn>> Comparison::Round(const TurnClient& client,
                                                        const Workload& workload,
                                                        uint64_t number) const {
  std::vector<absl::StatusOr<std::vector<SeenTurn>>> results(static_cast<size_t>(o_.clients));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = workload.script(client, number + i); });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<SeenTurn> all;
  for (auto& result : results) {
    RETURN_IF_ERROR(result.status());
    std::move(result->begin(), result->end(), std::back_inserter(all));
  }
  return all;
}

absl::Status Comparison::Run(const std::string& model) {
  std::map<std::string, Mesh> meshes;
  for (const char* way : kWays) {
    ASSIGN_OR_RETURN(meshes[way], Start(model, way));
  }
  uint64_t number = 1;
  for (int round = -1; round < o_.rounds; ++round) {  // the first is not counted
    for (const Workload& workload : workloads_) {
      for (size_t w = 0; w < kWays.size(); ++w) {
        // Who begins changes, and all get the same texts.
        const char* way = kWays[(w + static_cast<size_t>(round + 1)) % kWays.size()];
        const TurnClient& client = *meshes[way].client;
        absl::StatusOr<std::vector<SeenTurn>> turns = Round(client, workload, number);
        if (!turns.ok()) {
          return Annotate(turns.status(), absl::StrFormat("%s, %s", workload.name, way));
        }
        if (round < 0) continue;
        rounds_[{workload.name, way}].push_back(FiguresOf(*turns));
        for (const SeenTurn& turn : *turns) {
          ASSIGN_OR_RETURN(const v1::RequestExplanation why, client.Explain(turn.request_id));
          handed_over_[{workload.name, way}] += why.handoff_bytes() > 0;
          ++asked_[{workload.name, way}];
        }
      }
      number += static_cast<uint64_t>(o_.clients);
    }
  }
  return absl::OkStatus();
}

nlohmann::ordered_json Comparison::Json() const {
  nlohmann::ordered_json doc = {{"model", o_.model.empty() ? "random" : o_.model},
                                {"threads", o_.threads},
                                {"clients", o_.clients},
                                {"turns", o_.turns},
                                {"rounds", o_.rounds},
                                {"slack", kSlack}};
  for (const Workload& workload : workloads_) {
    nlohmann::ordered_json rows, planned;
    const auto& ours = rounds_.at({workload.name, kWays[0]});
    bool loses = false;
    for (const char* way : kWays) {
      const auto& rounds = rounds_.at({workload.name, way});
      nlohmann::ordered_json row = {{"disaggregation", way},
                                    {"requests", asked_.at({workload.name, way})},
                                    {"handed_over", handed_over_.at({workload.name, way})}};
      for (size_t f = 0; f < kFigures.size(); ++f) {
        std::vector<double> values;
        for (const Figures& figures : rounds) values.push_back(figures[f]);
        row[kFigures[f]] = Median(values);
        row[std::string(kFigures[f]) + "_rounds"] = values;
      }
      rows.push_back(std::move(row));
      if (way == kWays[0]) continue;
      nlohmann::ordered_json against;
      std::vector<double> together(rounds.size(), 0);
      for (size_t f = 0; f < kFigures.size(); ++f) {
        std::vector<double> ratios;
        for (size_t r = 0; r < rounds.size(); ++r) {
          ratios.push_back(ours[r][f] / rounds[r][f]);
          together[r] += std::log(ratios.back()) / static_cast<double>(kFigures.size());
        }
        against[kFigures[f]] = Median(ratios);
      }
      const auto [low, high] = std::minmax_element(together.begin(), together.end());
      const double all = std::exp(Median(together)), noise = std::exp((*high - *low) / 2) - 1;
      const bool worse = all > 1 + std::max(kSlack, noise);
      against["all"] = all;
      against["noise"] = noise;
      against["loses"] = worse;
      loses = loses || worse;
      planned[std::string("to_") + way] = std::move(against);
    }
    planned["loses"] = loses;
    doc["workloads"].push_back(
        {{"workload", workload.name}, {"rows", std::move(rows)}, {"planned", std::move(planned)}});
  }
  return doc;
}

void Print(const nlohmann::ordered_json& doc, std::ostream& out) {
  out << absl::StrFormat("%-10s %-8s %12s %10s %12s %10s %12s\n", "work", "handed", "ttft, mean",
                         "p90", "done, mean", "p90", "handed over");
  for (const auto& w : doc["workloads"]) {
    for (const auto& row : w["rows"]) {
      const auto ms = [&](const char* key) { return row[key].get<double>() * 1e3; };
      out << absl::StrFormat("%-10s %-8s %9.2f ms %7.2f ms %9.2f ms %7.2f ms %5d of %d\n",
                             w["workload"].get<std::string>(),
                             row["disaggregation"].get<std::string>(), ms("ttft_mean"),
                             ms("ttft_p90"), ms("completion_mean"), ms("completion_p90"),
                             row["handed_over"].get<int64_t>(), row["requests"].get<int64_t>());
    }
    for (const auto& [key, against] : w["planned"].items()) {
      if (!key.starts_with("to_")) continue;
      out << absl::StrFormat(
          "  planned / %-7s %12.3f %10.3f %12.3f %10.3f   together %.3f, +- %.3f%s\n",
          key.substr(3), against["ttft_mean"].get<double>(), against["ttft_p90"].get<double>(),
          against["completion_mean"].get<double>(), against["completion_p90"].get<double>(),
          against["all"].get<double>(), against["noise"].get<double>(),
          against["loses"].get<bool>() ? "  LOSES" : "");
    }
  }
}

absl::Status Check(const DisaggregationBenchOptions& o) {
  const std::pair<const char*, int64_t> sizes[] = {{"document-tokens", o.document_tokens},
                                                   {"agent-tokens", o.agent_tokens},
                                                   {"append-tokens", o.append_tokens},
                                                   {"chat-tokens", o.chat_tokens},
                                                   {"answer-tokens", o.answer_tokens}};
  for (const auto& [name, tokens] : sizes) {
    if (tokens < 1 || tokens > 1 << 20) {
      return InvalidArgument("%s: %d; use 1 to %d", name, tokens, 1 << 20);
    }
  }
  if (o.clients < 1 || o.clients > 64)
    return InvalidArgument("clients: %d; use 1 to 64", o.clients);
  if (o.turns < 1 || o.turns > 100) return InvalidArgument("turns: %d; use 1 to 100", o.turns);
  return absl::OkStatus();
}

}  // namespace

void AddDisaggregationBenchFlags(CLI::App* app, DisaggregationBenchOptions* o) {
  app->add_option("--model", o->model, "checkpoint folder (default: a small random model)")
      ->envname("DELTAMESH_MODEL");
  app->add_option("--threads", o->threads, "threads of each worker")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  const auto count = [app](const char* name, int64_t& value, const char* help) {
    app->add_option(name, value, help)->capture_default_str();
  };
  count("--document-tokens", o->document_tokens, "of a document's prompt");
  count("--agent-tokens", o->agent_tokens, "that a conversation of agents begins with");
  count("--append-tokens", o->append_tokens, "that its turns add");
  count("--chat-tokens", o->chat_tokens, "of a chat's prompt");
  count("--answer-tokens", o->answer_tokens, "of every answer");
  count("--clients", o->clients, "clients at once");
  count("--turns", o->turns, "requests of each client and kind in a round");
  app->add_option("--rounds", o->rounds, "the median is reported")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_flag("--json", o->json, "JSON instead of the table");
}

absl::Status RunDisaggregationBench(const DisaggregationBenchOptions& o, std::ostream& out) {
  InitLog("bench-disaggregation", LogLevel::kWarning);
  RETURN_IF_ERROR(Check(o));
  std::unique_ptr<ScratchFolder> scratch;
  ASSIGN_OR_RETURN(const std::string model, NamedOrRandomModel(o.model, &scratch));
  Comparison comparison(o);
  RETURN_IF_ERROR(comparison.Run(model));
  const nlohmann::ordered_json doc = comparison.Json();
  if (o.json) {
    out << doc.dump(1) << "\n";
  } else {
    Print(doc, out);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
