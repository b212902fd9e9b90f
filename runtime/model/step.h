// One forward pass in progress: every chunk's tokens are rows of one matrix.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/base/thread_pool.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/model/workspace.h"

namespace deltamesh {

// Rows [first, first + tokens) of the step belong to one sequence, whose row `first` stands at position
// `start`. The state's own position moves only when the whole step is done.
struct StepChunk {
  SequenceState* state;
  int64_t first;
  int64_t tokens;
  int64_t start;
  // Its slab takes S and conv as they are after the first `copy_after` tokens. May be null.
  SequenceState* copy = nullptr;
  int64_t copy_after = 0;
};

struct Step {
  std::span<const StepChunk> chunks;  // rows ascending, without gaps
  int64_t tokens;                     // rows in all, at least one
  ThreadPool& pool;
  Workspace& workspace;
  bool int8 = false;  // quantise the inputs of 8-bit and MXFP4 matrices
};

}  // namespace deltamesh
