#include "services/simulate/report.h"

#include "absl/strings/str_format.h"
#include "runtime/base/status.h"
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
  if (latency.count() == 0) {
    return {{"mean", nullptr}, {"p50", nullptr}, {"p90", nullptr}, {"p99", nullptr}};
  }
  return {{"mean", latency.mean()},
          {"p50", latency.Percentile(0.5)},
          {"p90", latency.Percentile(0.9)},
          {"p99", latency.Percentile(0.99)}};
}

std::string TimeText(const ordered_json& seconds) {
  return seconds.is_null() ? "-" : ReadableSeconds(seconds.get<double>());
}

// By the code that the router or a worker gave, in words of the code list.
ordered_json FailuresJson(const std::map<absl::StatusCode, MeshFailures>& failures) {
  ordered_json all = ordered_json::array();
  for (const auto& [code, f] : failures) {
    all.push_back({{"code", ToStd(absl::StatusCodeToString(code))},
                   {"requests", f.requests},
                   {"first", f.first}});
  }
  return all;
}

ordered_json MeshRow(const std::string& policy, std::string_view disaggregation,
                     const MeshRunResult& r, std::optional<double> bound_hit_rate) {
  ordered_json row = {{"policy", policy},
                      {"disaggregation", disaggregation},
                      {"requests", r.requests},
                      {"failed", r.failed}};
  row["failures"] = FailuresJson(r.failures);
  row["retries"] = r.retries;
  row["prompt_tokens"] = r.prompt_tokens;
  const bool any = r.prompt_tokens > 0;  // shares and means of nothing are null
  row["hit_rate"] = any ? ordered_json(r.hit_rate()) : ordered_json();
  if (bound_hit_rate && any) row["below_bound"] = *bound_hit_rate - r.hit_rate();
  row["recomputed_tokens_per_request"] =
      any ? ordered_json(r.recomputed_per_request()) : ordered_json();
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
  row["snapshot_bytes_peak"] = r.snapshot_bytes_peak;
  row["cache_bytes_peak"] = r.cache_bytes_peak;
  row["superseded"] = r.superseded;
  row["evicted"] = r.evicted;
  row["prefill_busy_share"] = r.prefill_busy;
  row["decode_busy_share"] = r.decode_busy;
  row["simulated_seconds"] = r.last_second;
  return row;
}

void PrintMeshRows(const ordered_json& rows, std::ostream& out) {
  out << absl::StrFormat("%-18s %8s %8s %10s %9s %8s %8s %8s %8s %8s %9s %9s %9s %9s %7s %7s\n",
                         "policy", "hit rate", "to bound", "recomputed", "moved", "ttft p50", "p90",
                         "p99", "gap p90", "done p90", "snapshots", "bytes", "all bytes",
                         "hand-offs", "appends", "failed");
  std::string failures;
  for (const ordered_json& row : rows) {
    const auto below = row.find("below_bound");
    const ordered_json& ttft = row["ttft_seconds"];
    const auto policy = row["policy"].get<std::string>();
    const auto way = row["disaggregation"].get<std::string>();
    const std::string name = way == "planned" ? policy : policy + ", " + way;
    const bool any = !row["hit_rate"].is_null();
    const auto count = [&](const char* key) { return Grouped(row[key].get<int64_t>()); };
    const auto bytes = [&](const char* key) { return DecimalBytes(row[key].get<double>()); };
    out << absl::StrFormat(
        "%-18s %8s %8s %10s %9s %8s %8s %8s %8s %8s %9s %9s %9s %9s %7s %7s\n", name,
        any ? absl::StrFormat("%.2f%%", row["hit_rate"].get<double>() * 100) : "-",
        below == row.end() ? "" : absl::StrFormat("%.2f", below->get<double>() * 100),
        any ? Grouped(static_cast<int64_t>(row["recomputed_tokens_per_request"].get<double>()))
            : "-",
        bytes("moved_bytes"), TimeText(ttft["p50"]), TimeText(ttft["p90"]), TimeText(ttft["p99"]),
        TimeText(row["token_gap_seconds"]["p90"]), TimeText(row["completion_seconds"]["p90"]),
        count("snapshots_peak"), bytes("snapshot_bytes_peak"), bytes("cache_bytes_peak"),
        count("handoffs"), Grouped(row["placed"]["append_on_decode"].get<int64_t>()),
        count("failed"));
    for (const ordered_json& f : row["failures"]) {
      failures += absl::StrFormat("%s: %s failed, %s, first %s\n", name,
                                  Grouped(f["requests"].get<int64_t>()),
                                  f["code"].get<std::string>(), f["first"].get<std::string>());
    }
  }
  const ordered_json& last = rows.back();
  out << failures
      << absl::StrFormat(
             "(%s: prefill workers busy %.1f %%, decode workers %.1f %% of %s; snapshots "
             "and bytes at most at once, all workers together)\n",
             last["policy"].get<std::string>(), last["prefill_busy_share"].get<double>() * 100,
             last["decode_busy_share"].get<double>() * 100,
             ReadableSeconds(last["simulated_seconds"].get<double>()));
}

}  // namespace deltamesh
