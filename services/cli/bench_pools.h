// Room for the states of a benchmark's own sequences.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "runtime/cache/sequence_state.h"

namespace deltamesh {

// For `sequences` of at most `tokens` each. RESOURCE_EXHAUSTED says how much they would need.
absl::StatusOr<StatePools> BenchPools(const StateLayout& layout, int64_t sequences, int64_t tokens);

}  // namespace deltamesh
