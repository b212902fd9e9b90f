// A prefill worker as a process: owns everything and runs it until a signal.
#pragma once

#include "services/worker/attention_worker.h"

namespace deltamesh {

// One prompt may fill a step: nobody waits for tokens here, each pass over the experts costs the same for
// more of them, and prompts that come meanwhile share the next step.
AttentionFlags PrefillDefaults();

// Returns the exit code. Call on the main thread before any other thread exists.
int RunPrefill(AttentionFlags flags);

}  // namespace deltamesh
