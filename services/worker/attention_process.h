// A prefill or decode worker as a process: what both own alike, from the checked flags to the exit code. A
// role adds its core and its end of hand-offs.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/base/clock.h"
#include "services/worker/attention_worker.h"
#include "services/worker/worker_host.h"

namespace deltamesh {

// Of the main thread.
class AttentionProcess {
 public:
  // Checks the flags, opens the transport and the ports, loads the model. `signals` must outlive it.
  static absl::StatusOr<std::unique_ptr<AttentionProcess>> Start(const std::string& role,
                                                                 AttentionFlags flags,
                                                                 const SignalWaiter& signals);

  const AttentionFlags& flags() const { return flags_; }
  const WorkerHostOptions& host_options() const { return host_options_; }
  const Clock* clock() const { return &clock_; }
  WorkerHost& host() { return *host_; }
  AttentionWorker& worker() { return *worker_; }

  // Prints the configuration, `bounds` of the role last, and serves until the process is to end.
  int Run(WorkerCore* core, std::vector<std::pair<std::string, std::string>> bounds);

 private:
  AttentionProcess() = default;
  AttentionFlags flags_;
  WorkerHostOptions host_options_;
  SystemClock clock_;
  std::unique_ptr<WorkerHost> host_;
  std::unique_ptr<AttentionWorker> worker_;
};

}  // namespace deltamesh
