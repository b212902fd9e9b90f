// Traffic through a mesh of virtual workers: the router is the real RouterCore and hears and says the real
// messages, which take no time; computing and moving state do.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "services/router/router_options.h"
#include "services/simulate/cache_policy.h"
#include "services/simulate/latency.h"
#include "services/simulate/policy_cache.h"
#include "services/simulate/traffic.h"
#include "services/simulate/virtual_worker.h"

namespace deltamesh {

struct MeshRunOptions {
  int64_t prefill_workers = 8, decode_workers = 8;
  CachePolicy policy;
  CacheBytes cache;  // of each worker
  WorkerRates rates;
  SchedulerOptions prefill_scheduler = {
      .step_tokens_max = 8192, .chunk_tokens_max = 8192, .running_max = 16};
  SchedulerOptions decode_scheduler = {
      .step_tokens_max = 2048, .chunk_tokens_max = 1024, .running_max = 64};
  int64_t slabs = 64;  // sequences at once on a worker
  Disaggregation disaggregation = Disaggregation::kPlanned;
  double link_bytes_per_second = 50e9;
  double link_seconds = 100e-6;
};

// Requests that failed for one reason, with the first one's words.
struct MeshFailures {
  int64_t requests = 0;
  std::string first;
};

struct MeshRunResult {
  int64_t requests = 0, failed = 0, retries = 0;
  std::map<absl::StatusCode, MeshFailures> failures;  // of `failed`
  int64_t prompt_tokens = 0;                          // of finished requests
  int64_t restored_tokens = 0;                        // of them, from caches, as clients are told
  int64_t computed_tokens = 0;                        // of prompts, by workers
  int64_t handoffs = 0, fetches = 0, moved_bytes = 0;
  int64_t placed_prefill = 0, placed_append = 0, placed_alone = 0;
  int64_t placed_fetch = 0;                          // on a decode worker, which fetches first
  int64_t snapshots_peak = 0, cache_bytes_peak = 0;  // of all workers together
  int64_t snapshot_bytes_peak = 0;                   // of as many as snapshots_peak
  int64_t superseded = 0, evicted = 0;
  double last_second = 0;
  double prefill_busy = 0, decode_busy = 0;  // share of their time
  // Since the request came, however often it was refused: until the first token, and until the last one.
  Latency first_token, completion;
  Latency token_gap;  // of an answer's tokens after the first, the mean

  double hit_rate() const;
  double recomputed_per_request() const;
};

absl::StatusOr<MeshRunResult> RunMesh(Traffic& traffic, const MeshRunOptions& options);

}  // namespace deltamesh
