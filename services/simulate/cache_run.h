// Traffic through one cache that is always there and takes no time: what a policy is worth by itself.
//
// A prompt's snapshots are there when it comes, its answer's end when the answer ends.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "services/simulate/policy_cache.h"
#include "services/simulate/traffic.h"

namespace deltamesh {

struct CacheRunResult {
  int64_t requests = 0;
  int64_t prompt_tokens = 0;
  int64_t restored_tokens = 0;
  int64_t snapshots_peak = 0;
  int64_t snapshot_bytes_peak = 0;
  int64_t bytes_peak = 0;  // of all that is held
  int64_t snapshots_taken = 0, superseded = 0, evicted = 0;
  int64_t prompts_with_grid = 0;  // planned while there was a grid
  double last_second = 0;

  double hit_rate() const;  // of tokens
  double recomputed_per_request() const;
};

absl::StatusOr<CacheRunResult> RunCache(Traffic& traffic, const CachePolicy& policy,
                                        const CacheBytes& bytes);

}  // namespace deltamesh
