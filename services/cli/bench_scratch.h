// Where a benchmark writes what it only needs while it runs.
#pragma once

#include "absl/status/status.h"

namespace deltamesh {

// Goes on in a child process whose TMPDIR is a folder of its own, and returns there. The calling one waits
// for the child and for what that leaves running, removes the folder and ends as the child did, also after a
// signal, which it passes on. Call on the main thread before there are others, with nothing printed yet.
// UNAVAILABLE, still in the calling process, when there can be no such folder.
absl::Status ContinueInScratch();

}  // namespace deltamesh
