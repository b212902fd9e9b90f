#include "services/worker/attention_process.h"

#include "runtime/base/status.h"
#include "services/worker/early_checks.h"
#include "services/worker/model_loading.h"

namespace deltamesh {

absl::StatusOr<std::unique_ptr<AttentionProcess>> AttentionProcess::Start(
    const std::string& role, AttentionFlags flags, const SignalWaiter& signals) {
  std::unique_ptr<AttentionProcess> process(new AttentionProcess());
  RETURN_IF_ERROR(CheckStoreName(flags));
  RETURN_IF_ERROR(FinishWorkerFlags(role, &flags.worker));
  RETURN_IF_ERROR(CheckStores(flags, ReadEnvironment));
  ASSIGN_OR_RETURN(auto transport, OpenUcx(flags.worker));
  process->flags_ = std::move(flags);
  process->host_options_.role = role;
  process->host_options_.flags = process->flags_.worker;
  ASSIGN_OR_RETURN(process->host_,
                   WorkerHost::Start(process->host_options_, &signals, &process->clock_));
  ASSIGN_OR_RETURN(process->worker_, AttentionWorker::Create(process->flags_, std::move(transport),
                                                             [host = process->host_.get()] {
                                                               host->Post([](absl::Time) {});
                                                             }));
  return process;
}

int AttentionProcess::Run(WorkerCore* core,
                          std::vector<std::pair<std::string, std::string>> bounds) {
  auto lines = worker_->Describe();
  for (auto& line : DescribeHost(host_options_)) lines.push_back(std::move(line));
  for (auto& line : bounds) lines.push_back(std::move(line));
  PrintConfiguration("deltamesh " + host_options_.role, lines);

  WorkerHost::Role role;
  role.core = core;
  role.transport = &worker_->transport();
  role.ready = [this] { return worker_->ExpertsReady(); };
  role.metrics = [this] { return worker_->Metrics(); };
  return host_->Run(role);
}

}  // namespace deltamesh
