#include "services/plan/plan_report.h"

#include <cmath>
#include <optional>

#include "absl/strings/str_format.h"
#include "runtime/base/status.h"
#include "services/common/quantities.h"

namespace deltamesh {
namespace {

using nlohmann::ordered_json;

int64_t Whole(double bytes) { return std::llround(bytes); }

constexpr double kBytesMax = 9e18;  // below 2^63: bytes are told as whole numbers

absl::Status Check(const PlanQuestions& q) {
  for (const int64_t tokens : q.lengths) {
    RETURN_IF_ERROR(CheckWhole("lengths", tokens, 1, kPlanTokensMax, "tokens"));
  }
  const VariantOptions& v = q.variants;
  RETURN_IF_ERROR(CheckWhole("compare-tokens", v.tokens, 1, kPlanTokensMax, "tokens"));
  RETURN_IF_ERROR(CheckWhole("window", v.window, 1, kPlanTokensMax, "tokens"));
  RETURN_IF_ERROR(CheckWhole("kv-heads", v.groups, 1, kKvHeadsMax, "heads"));
  return CheckWhole("append-tokens", q.append_tokens, 0, kPlanTokensMax, "tokens");
}

// None when no requests are asked for; either way the machine is checked.
absl::StatusOr<std::optional<Fleet>> FleetOf(const ModelShape& shape, const SequenceSizes& sizes,
                                             const PlanQuestions& q) {
  if (q.traffic.requests_per_second == 0) {
    RETURN_IF_ERROR(CheckMachine(q.machine));
    return std::nullopt;
  }
  ASSIGN_OR_RETURN(Fleet fleet, PlanFleet(shape, sizes, q.machine, q.traffic, q.router));
  return fleet;
}

absl::Status CheckBytes(const char* name, int64_t tokens, double bytes) {
  if (bytes <= kBytesMax) return absl::OkStatus();
  return InvalidArgument("%s: %s tokens take %.3g bytes, more than %.0g; use fewer", name,
                         Grouped(tokens), bytes, kBytesMax);
}

ordered_json ModelPart(const ModelShape& shape) {
  ordered_json weights;
  for (const auto& [dtype, bytes] : shape.weight_bytes) weights[dtype] = bytes;
  weights["all"] = shape.total_weight_bytes();
  weights["routed_experts"] = shape.expert_bytes;
  return {{"family", shape.family},
          {"recurrent_layers", shape.layout.kda_layers},
          {"attention_layers", shape.layout.mla_layers},
          {"parameters", shape.parameters},
          {"context_tokens", shape.context_tokens},
          {"weights", std::move(weights)}};
}

ordered_json SequencePart(const SequenceSizes& s) {
  return {{"state", Whole(s.state)},
          {"conv", Whole(s.conv)},
          {"snapshot", Whole(s.snapshot())},
          {"running", Whole(s.running())},
          {"latents_per_token", Whole(s.per_token)},
          {"latents_per_block", Whole(s.per_block)},
          {"break_even_tokens", BreakEvenTokens(s)}};
}

ordered_json LengthRow(const ModelShape& shape, const SequenceSizes& s, const PlanQuestions& q,
                       int64_t tokens) {
  ordered_json row = {
      {"tokens", tokens},
      {"resting", Whole(s.resting(tokens))},
      {"handoff_seconds", HandoffSeconds(s, q.machine, tokens)},
      {"append_handoff_seconds", HandoffSeconds(s, q.machine, std::min(tokens, q.append_tokens))}};
  if (q.machine.memory_bytes > 0) {
    row["sessions_per_worker"] = SessionsPerWorker(shape, s, q.machine, tokens);
  }
  return row;
}

ordered_json NeededPart(const Needed& needed) {
  ordered_json part = {{"workers", needed.count()}, {"decided_by", needed.largest().name}};
  for (const Limit& limit : needed.limits) part["by_" + limit.name] = Needed::Whole(limit);
  return part;
}

ordered_json ExpertPart(const ModelShape& shape, const Fleet& fleet) {
  ordered_json part = NeededPart(fleet.expert);
  const ExpertLoad& e = fleet.experts;
  // More workers than ids of experts hold some of them twice.
  const int64_t copies = (fleet.expert.count() + shape.experts - 1) / shape.experts;
  part.update({{"copies", copies},
               {"flops_per_token", e.flops_per_token},
               {"row_bytes_per_token", Whole(e.row_bytes_per_token)},
               {"read_bytes_per_second", e.read_bytes_per_second},
               {"worker_flops_per_second", e.flops_per_second},
               {"worker_read_bytes_per_second", e.reads_per_second}});
  return part;
}

ordered_json FleetPart(const ModelShape& shape, const Fleet& fleet) {
  ordered_json part = {{"resident_sequences", fleet.resident_sequences},
                       {"prefill", NeededPart(fleet.prefill)},
                       {"decode", NeededPart(fleet.decode)}};
  if (!fleet.expert.limits.empty()) part["expert"] = ExpertPart(shape, fleet);
  part["router"] = NeededPart(fleet.router);
  part["router"]["cpu_seconds_per_request"] = fleet.router_cpu_per_request;
  return part;
}

void PrintModel(const ordered_json& model, std::ostream& out) {
  out << absl::StrFormat(
      "model       %s, %d recurrent and %d attention layers, %s parameters\n",
      model["family"].get<std::string>(), model["recurrent_layers"].get<int64_t>(),
      model["attention_layers"].get<int64_t>(), Grouped(model["parameters"].get<int64_t>()));
  for (const auto& [dtype, bytes] : model["weights"].items()) {
    out << absl::StrFormat("weights     %-14s %23s bytes\n", dtype, Grouped(bytes.get<int64_t>()));
  }
}

void PrintSequence(const ordered_json& s, std::ostream& out) {
  const auto line = [&](const char* key, const char* text) {
    out << absl::StrFormat("sequence    %-14s %23s bytes  %s\n", key,
                           Grouped(s[key].get<int64_t>()), text);
  };
  line("state", "recurrent state, whatever the length");
  line("conv", "inputs of the convolutions");
  line("snapshot", "both: what rests and moves besides latents");
  line("running", "with the open tile");
  out << absl::StrFormat("latents     %-14s %23s bytes\n", "per token",
                         Grouped(s["latents_per_token"].get<int64_t>()));
  out << absl::StrFormat("latents     %-14s %23s bytes\n", "per block",
                         Grouped(s["latents_per_block"].get<int64_t>()));
  out << absl::StrFormat("latents     equal a snapshot at %s tokens\n",
                         Grouped(s["break_even_tokens"].get<int64_t>()));
}

void PrintLengths(const ordered_json& rows, std::ostream& out) {
  out << absl::StrFormat("\n%12s %12s %14s %16s %12s\n", "tokens", "rests in", "hand-off",
                         "of a turn only", "per worker");
  for (const ordered_json& row : rows) {
    const auto sessions = row.find("sessions_per_worker");
    out << absl::StrFormat("%12s %12s %14s %16s %12s\n", Grouped(row["tokens"].get<int64_t>()),
                           DecimalBytes(row["resting"].get<double>()),
                           ReadableSeconds(row["handoff_seconds"].get<double>()),
                           ReadableSeconds(row["append_handoff_seconds"].get<double>()),
                           sessions == row.end() ? "-" : Grouped(sessions->get<int64_t>()));
  }
}

void PrintVariants(const ordered_json& variants, std::ostream& out) {
  out << absl::StrFormat("\ncache of one sequence of %s tokens, %g bytes a value\n",
                         Grouped(variants["tokens"].get<int64_t>()),
                         variants["value_bytes"].get<double>());
  for (const ordered_json& v : variants["rows"]) {
    out << absl::StrFormat("%-15s %12s %8.2fx  %s\n", v["name"].get<std::string>(),
                           DecimalBytes(v["bytes"].get<double>()), v["times"].get<double>(),
                           v["how"].get<std::string>());
  }
}

// "prefill       8   by compute (compute 8, memory 1, link 2)"
void PrintNeeded(const char* role, const ordered_json& n, std::ostream& out) {
  std::string limits;
  for (const auto& [key, value] : n.items()) {
    if (!key.starts_with("by_")) continue;
    limits += absl::StrFormat("%s%s %s", limits.empty() ? "" : ", ", key.substr(3),
                              Grouped(value.get<int64_t>()));
  }
  out << absl::StrFormat("%-8s %13s   by %s (%s)\n", role, Grouped(n["workers"].get<int64_t>()),
                         n["decided_by"].get<std::string>(), limits);
}

void PrintFleet(const ordered_json& fleet, std::ostream& out) {
  out << absl::StrFormat("\nworkers for the traffic (%.1f sequences at once)\n",
                         fleet["resident_sequences"].get<double>());
  PrintNeeded("prefill", fleet["prefill"], out);
  PrintNeeded("decode", fleet["decode"], out);
  if (const auto expert = fleet.find("expert"); expert == fleet.end()) {
    out << absl::StrFormat("%-8s %13s   every worker holds them\n", "expert", "0");
  } else {
    PrintNeeded("expert", *expert, out);
    const auto rate = [&](const char* key) { return (*expert)[key].get<double>(); };
    out << absl::StrFormat(
        "%24s a token: %.3g GFLOP, %s of rows that come back, fewer go out; %s of "
        "weights read a second\n",
        "", rate("flops_per_token") / 1e9, DecimalBytes(rate("row_bytes_per_token")),
        DecimalBytes(rate("read_bytes_per_second")));
    out << absl::StrFormat("%24s a worker: %.3g TFLOP and %s a second\n", "",
                           rate("worker_flops_per_second") / 1e12,
                           DecimalBytes(rate("worker_read_bytes_per_second")));
    const int64_t copies = (*expert)["copies"].get<int64_t>();
    if (copies > 1) {
      out << absl::StrFormat("%24s more than there are experts: up to %s copies of each\n", "",
                             Grouped(copies));
    }
  }
  const ordered_json& router = fleet["router"];
  PrintNeeded("router", router, out);
  out << absl::StrFormat("%24s a request: %s of CPU\n", "",
                         ReadableSeconds(router["cpu_seconds_per_request"].get<double>()));
}

}  // namespace

absl::StatusOr<ordered_json> PlanDocument(const ModelShape& shape, const PlanQuestions& q) {
  RETURN_IF_ERROR(Check(q));
  const SequenceSizes sizes = SizesOf(shape, q.widths);
  ASSIGN_OR_RETURN(const std::optional<Fleet> fleet, FleetOf(shape, sizes, q));
  ordered_json document = {{"model", ModelPart(shape)}, {"sequence", SequencePart(sizes)}};
  ordered_json lengths = ordered_json::array();
  for (const int64_t tokens : q.lengths) {
    RETURN_IF_ERROR(CheckBytes("lengths", tokens, sizes.resting(tokens)));
    lengths.push_back(LengthRow(shape, sizes, q, tokens));
  }
  document["lengths"] = std::move(lengths);
  ordered_json rows = ordered_json::array();
  const std::vector<CacheVariant> variants = CompareCaches(shape, q.widths, q.variants);
  for (const CacheVariant& v : variants) {
    RETURN_IF_ERROR(CheckBytes("compare-tokens", q.variants.tokens, v.bytes));
    rows.push_back({{"name", v.name},
                    {"how", v.how},
                    {"per_token", Whole(v.per_token)},
                    {"fixed", Whole(v.fixed)},
                    {"bytes", Whole(v.bytes)},
                    {"times", v.bytes / std::max(variants.front().bytes, 1.0)}});
  }
  document["as_if"] = {{"tokens", q.variants.tokens},
                       {"value_bytes", q.variants.value_bytes},
                       {"rows", std::move(rows)}};
  if (q.machine.memory_bytes > 0) {
    document["worker"] = {{"memory", Whole(q.machine.memory_bytes)},
                          {"for_sequences", Whole(MemoryForSequences(shape, q.machine))},
                          {"link_bytes_per_second", q.machine.link_bytes_per_second},
                          {"expert_shards", q.machine.expert_shards}};
  }
  if (fleet) document["fleet"] = FleetPart(shape, *fleet);
  return document;
}

void PrintPlan(const ordered_json& document, std::ostream& out) {
  PrintModel(document["model"], out);
  PrintSequence(document["sequence"], out);
  PrintLengths(document["lengths"], out);
  PrintVariants(document["as_if"], out);
  if (document.contains("worker")) {
    out << absl::StrFormat("\na worker's memory less its weights: %s\n",
                           DecimalBytes(document["worker"]["for_sequences"].get<double>()));
  }
  if (document.contains("fleet")) PrintFleet(document["fleet"], out);
}

}  // namespace deltamesh
