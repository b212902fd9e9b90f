// What a hand-off moves between two processes on loopback, and what the same bytes could move at best.
//
// The other process is this binary again; it grants landings and verifies what arrives, as a decode worker
// does. Both ends take turns with the ceiling: `ucx_perftest` (active messages) where it is installed, else a
// plain TCP connection.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "services/cli/bench_rows.h"

namespace deltamesh {

struct HandoffBenchOptions {
  std::vector<int64_t> mib = {4, 64};       // of a state
  std::vector<int64_t> in_flight = {1, 4};  // hand-offs at once
  int64_t moved_mib = 256;                  // in one run, at least one hand-off
  int repetitions = 3;
  bool ceiling = true;  // take turns with it
};

absl::Status CheckHandoffOptions(const HandoffBenchOptions& options);
// Rows that were measured before an error are added too.
absl::Status MeasureHandoff(const HandoffBenchOptions& options, std::vector<BenchRow>* rows);

// The other process: takes lines from standard input, answers on standard output, ends with the input.
// Returns the exit code.
int RunHandoffPeer();

}  // namespace deltamesh
