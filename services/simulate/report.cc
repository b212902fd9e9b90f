#include "services/simulate/report.h"

#include "absl/strings/str_format.h"
#include "services/common/quantities.h"

namespace deltamesh {

using nlohmann::ordered_json;

ordered_json CacheRow(const std::string& policy, const CacheRunResult& r,
                      const std::optional<CacheRunResult>& bound) {
  ordered_json row = {{"policy", policy},
                      {"requests", r.requests},
                      {"prompt_tokens", r.prompt_tokens},
                      {"hit_rate", r.hit_rate()}};
  if (bound) row["below_bound"] = bound->hit_rate() - r.hit_rate();
  row["recomputed_tokens_per_request"] = r.recomputed_per_request();
  row["snapshots_peak"] = r.snapshots_peak;
  row["snapshot_bytes_peak"] = r.snapshot_bytes_peak;
  row["bytes_peak"] = r.bytes_peak;
  row["snapshots_taken"] = r.snapshots_taken;
  row["superseded"] = r.superseded;
  row["evicted"] = r.evicted;
  row["prompts_with_grid"] = r.prompts_with_grid;
  return row;
}

void PrintCacheRows(const ordered_json& rows, std::ostream& out) {
  out << absl::StrFormat("%-18s %8s %8s %11s %10s %10s %10s %10s %10s\n", "policy", "hit rate",
                         "to bound", "recomputed", "snapshots", "bytes", "all bytes", "superseded",
                         "evicted");
  for (const ordered_json& row : rows) {
    const auto below = row.find("below_bound");
    out << absl::StrFormat(
        "%-18s %7.2f%% %8s %11s %10s %10s %10s %10s %10s\n", row["policy"].get<std::string>(),
        row["hit_rate"].get<double>() * 100,
        below == row.end() ? "" : absl::StrFormat("%.2f", below->get<double>() * 100),
        Grouped(static_cast<int64_t>(row["recomputed_tokens_per_request"].get<double>())),
        Grouped(row["snapshots_peak"].get<int64_t>()),
        DecimalBytes(row["snapshot_bytes_peak"].get<double>()),
        DecimalBytes(row["bytes_peak"].get<double>()), Grouped(row["superseded"].get<int64_t>()),
        Grouped(row["evicted"].get<int64_t>()));
  }
  out << "(tokens of prompts; recomputed ones a request; snapshots and their bytes at most at "
         "once)\n";
}

ordered_json LatencyJson(const Latency& latency) {
  return {{"mean", latency.mean()},
          {"p50", latency.Percentile(0.5)},
          {"p90", latency.Percentile(0.9)},
          {"p99", latency.Percentile(0.99)}};
}

ordered_json MeshRow(const std::string& policy, std::string_view disaggregation,
                     const MeshRunResult& r, std::optional<double> bound_hit_rate) {
  ordered_json row = {{"policy", policy},        {"disaggregation", disaggregation},
                      {"requests", r.requests},  {"failed", r.failed},
                      {"retries", r.retries},    {"prompt_tokens", r.prompt_tokens},
                      {"hit_rate", r.hit_rate()}};
  if (bound_hit_rate) row["below_bound"] = *bound_hit_rate - r.hit_rate();
  row["recomputed_tokens_per_request"] = r.recomputed_per_request();
  row["computed_tokens"] = r.computed_tokens;
  row["handoffs"] = r.handoffs;
  row["moved_bytes"] = r.moved_bytes;
  row["placed"] = {{"prefill", r.placed_prefill},
                   {"append_on_decode", r.placed_append},
                   {"fetch_on_decode", r.placed_fetch},
                   {"alone_on_decode", r.placed_alone}};
  row["fetches"] = r.fetches;
  row["ttft_seconds"] = LatencyJson(r.first_token);
  row["token_gap_seconds"] = LatencyJson(r.token_gap);
  row["completion_seconds"] = LatencyJson(r.completion);
  row["snapshots_peak"] = r.snapshots_peak;
  row["cache_bytes_peak"] = r.cache_bytes_peak;
  row["superseded"] = r.superseded;
  row["evicted"] = r.evicted;
  row["prefill_busy_share"] = r.prefill_busy;
  row["decode_busy_share"] = r.decode_busy;
  row["simulated_seconds"] = r.last_second;
  return row;
}

void PrintMeshRows(const ordered_json& rows, std::ostream& out) {
  out << absl::StrFormat("%-18s %8s %8s %10s %9s %8s %8s %8s %8s %8s %9s %9s %7s %7s\n", "policy",
                         "hit rate", "to bound", "recomputed", "moved", "ttft p50", "p90", "p99",
                         "gap p90", "done p90", "snapshots", "hand-offs", "appends", "failed");
  for (const ordered_json& row : rows) {
    const auto below = row.find("below_bound");
    const ordered_json& ttft = row["ttft_seconds"];
    const auto policy = row["policy"].get<std::string>();
    const auto way = row["disaggregation"].get<std::string>();
    const auto time = [&](const char* key) { return ReadableSeconds(ttft[key].get<double>()); };
    out << absl::StrFormat(
        "%-18s %7.2f%% %8s %10s %9s %8s %8s %8s %8s %8s %9s %9s %7s %7s\n",
        way == "planned" ? policy : policy + ", " + way, row["hit_rate"].get<double>() * 100,
        below == row.end() ? "" : absl::StrFormat("%.2f", below->get<double>() * 100),
        Grouped(static_cast<int64_t>(row["recomputed_tokens_per_request"].get<double>())),
        DecimalBytes(row["moved_bytes"].get<double>()), time("p50"), time("p90"), time("p99"),
        ReadableSeconds(row["token_gap_seconds"]["p90"].get<double>()),
        ReadableSeconds(row["completion_seconds"]["p90"].get<double>()),
        Grouped(row["snapshots_peak"].get<int64_t>()), Grouped(row["handoffs"].get<int64_t>()),
        Grouped(row["placed"]["append_on_decode"].get<int64_t>()),
        Grouped(row["failed"].get<int64_t>()));
  }
  const ordered_json& last = rows.back();
  out << absl::StrFormat("(%s: prefill workers busy %.1f %%, decode workers %.1f %% of %s)\n",
                         last["policy"].get<std::string>(),
                         last["prefill_busy_share"].get<double>() * 100,
                         last["decode_busy_share"].get<double>() * 100,
                         ReadableSeconds(last["simulated_seconds"].get<double>()));
}

}  // namespace deltamesh
