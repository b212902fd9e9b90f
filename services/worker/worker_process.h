// What the main of every worker does around its serving, whatever the role.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "services/common/flags.h"
#include "services/common/process.h"

namespace deltamesh {

// Sets up signals, the log and the tie to the parent process, then calls `serve`, which returns an exit code;
// an error is logged and 1 is returned. Call on the main thread before any other thread exists.
int RunWorker(const std::string& role, const WorkerFlags& flags,
              const std::function<absl::StatusOr<int>(const SignalWaiter& signals)>& serve);

}  // namespace deltamesh
