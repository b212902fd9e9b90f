#include "services/plan/plan_report.h"

#include <cmath>

#include "absl/strings/str_format.h"
#include "runtime/base/status.h"
#include "services/common/quantities.h"

namespace deltamesh {
namespace {

using nlohmann::ordered_json;

int64_t Whole(double bytes) { return std::llround(bytes); }

// So that sums of their bytes stay below 2^63.
constexpr int64_t kTokensMax = 100'000'000'000;

bool InRange(int64_t tokens) { return tokens >= 1 && tokens <= kTokensMax; }

absl::Status Check(const PlanQuestions& q) {
  for (const int64_t tokens : q.lengths) {
    if (!InRange(tokens)) {
      return InvalidArgument("lengths: %d tokens; use 1 to %d", tokens, kTokensMax);
    }
  }
  if (!InRange(q.variants.tokens) || !InRange(q.variants.groups) || !InRange(q.variants.window)) {
    return InvalidArgument("compare-tokens %d, kv-heads %d, window %d: use 1 to %d",
                           q.variants.tokens, q.variants.groups, q.variants.window, kTokensMax);
  }
  if (q.append_tokens < 0 || q.append_tokens > kTokensMax) {
    return InvalidArgument("append-tokens: %d; use 0 to %d", q.append_tokens, kTokensMax);
  }
  if (!(q.machine.link_bytes_per_second > 0)) {
    return InvalidArgument("link: %g bytes per second; use more than 0",
                           q.machine.link_bytes_per_second);
  }
  return absl::OkStatus();
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
  return {{"workers", needed.count()},
          {"by_compute", needed.by_compute},
          {"by_memory", needed.by_memory},
          {"by_link", needed.by_link}};
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

void PrintFleet(const ordered_json& fleet, std::ostream& out) {
  out << absl::StrFormat("\nworkers for the traffic (%.1f sequences at once)\n",
                         fleet["resident_sequences"].get<double>());
  for (const char* role : {"prefill", "decode"}) {
    const ordered_json& n = fleet[role];
    out << absl::StrFormat(
        "%-8s %6s   by compute %s, memory %s, link %s\n", role,
        Grouped(n["workers"].get<int64_t>()), Grouped(n["by_compute"].get<int64_t>()),
        Grouped(n["by_memory"].get<int64_t>()), Grouped(n["by_link"].get<int64_t>()));
  }
  out << absl::StrFormat("%-8s %6s\n", "expert", Grouped(fleet["expert_shards"].get<int64_t>()));
}

}  // namespace

absl::StatusOr<ordered_json> PlanDocument(const ModelShape& shape, const PlanQuestions& q) {
  RETURN_IF_ERROR(Check(q));
  const SequenceSizes sizes = SizesOf(shape, q.widths);
  ordered_json document = {{"model", ModelPart(shape)}, {"sequence", SequencePart(sizes)}};
  ordered_json lengths = ordered_json::array();
  for (const int64_t tokens : q.lengths) lengths.push_back(LengthRow(shape, sizes, q, tokens));
  document["lengths"] = std::move(lengths);
  ordered_json rows = ordered_json::array();
  const std::vector<CacheVariant> variants = CompareCaches(shape, q.widths, q.variants);
  for (const CacheVariant& v : variants) {
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
  if (q.traffic.requests_per_second > 0) {
    if (q.machine.memory_bytes <= 0) {
      return InvalidArgument("memory: is missing; workers for a traffic depend on it");
    }
    ASSIGN_OR_RETURN(const Fleet fleet, PlanFleet(shape, sizes, q.machine, q.traffic));
    document["fleet"] = {{"resident_sequences", fleet.resident_sequences},
                         {"prefill", NeededPart(fleet.prefill)},
                         {"decode", NeededPart(fleet.decode)},
                         {"expert_shards", fleet.expert_shards}};
  }
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
