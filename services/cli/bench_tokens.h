// The ids that benchmarks feed: a fixed hash, so that any engine can be fed the same.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/base/ids.h"

namespace deltamesh {

// The last 16 ids of a vocabulary, where special tokens are, never come.
TokenId BenchToken(uint64_t sequence, uint64_t position, int64_t vocab);

// FAILED_PRECONDITION when a vocabulary leaves no ids.
absl::Status CheckBenchVocab(int64_t vocab);

}  // namespace deltamesh
