// A prefill worker as a process: owns everything and runs it until a signal.
#pragma once

#include "services/worker/attention_worker.h"

namespace deltamesh {

// Returns the exit code. Call on the main thread before any other thread exists.
int RunPrefill(AttentionFlags flags);

}  // namespace deltamesh
