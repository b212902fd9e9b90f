// What it takes a prefill worker to fetch the state that a decode worker holds, as turns of a conversation
// see it: a part of `deltamesh bench-sessions`.
//
// Two routers share a decode worker. Through one of them it computes what it is asked; the other one hands
// every prompt over from a prefill worker, which is started anew for each turn that is to fetch all of the
// state. Who brings what is the planner's choice: turns that it would rather compute are not counted.
//
//   a turn of `append` tokens   the prefill worker fetches all of the prompt before it, computes the turn and
//                               hands over
//   the next but one            the prefill worker fetches what the decode worker computed since
//   the first one, not cached   the prefill worker computes all of it and hands over
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/cache/state_layout.h"

namespace deltamesh {

struct FetchBenchOptions {
  std::string model;  // checkpoint folder
  int threads = 2;    // of each worker
  std::string weights = "stored", activations = "float", packed_dir = "auto";
  StateLayout layout;  // of the model
  int64_t context = 32768, append = 700;
  int repetitions = 5;
};

// One of each for a turn that was counted.
struct FetchRuns {
  std::vector<double> all_seconds,
      all_rate;  // of the fetch, from asking to the last byte; GB a second
  std::vector<double> new_seconds, new_rate;
  std::vector<double> fetched_first, computed_first;  // first tokens of the same turns
  int64_t all_bytes = 0, new_bytes = 0;               // of the last one

  // Of the turns that fetched all, first tokens over that of computing it again.
  std::vector<double> over_computed() const;
};

// INTERNAL: the answer after a fetch differs from the one computed again. Call on the main thread.
absl::StatusOr<FetchRuns> MeasureFetches(const FetchBenchOptions& options);

}  // namespace deltamesh
