#include "services/worker/worker_process.h"

#include "runtime/base/log.h"

namespace deltamesh {

int RunWorker(const std::string& role, const WorkerFlags& flags,
              const std::function<absl::StatusOr<int>(const SignalWaiter& signals)>& serve) {
  const SignalWaiter signals;
  InitLog(role, ParseLogLevel(flags.log_level));
  if (flags.parent != 0) DieWithParent(static_cast<pid_t>(flags.parent));
  const absl::StatusOr<int> code = serve(signals);
  if (code.ok()) return *code;
  LogError(role + ".failed_to_start", {{"error", code.status().ToString()}});
  return 1;
}

}  // namespace deltamesh
