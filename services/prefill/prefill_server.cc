#include "services/prefill/prefill_server.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_sender.h"
#include "services/prefill/prefill_core.h"
#include "services/worker/model_loading.h"
#include "services/worker/worker_host.h"

namespace deltamesh {
namespace {

// Speaks for the sender while the core's thread computes a step that takes longer than the receiver
// tolerates silence. Ends with its scope.
class KeepAliveThread {
 public:
  KeepAliveThread(HandoffSender* sender, const Clock* clock)
      : thread_([this, sender, clock] {
          std::unique_lock lock(mutex_);
          while (!changed_.wait_for(lock, kEvery, [this] { return stop_; })) {
            sender->KeepAlive(clock->Now());
          }
        }) {}
  ~KeepAliveThread() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  static constexpr std::chrono::milliseconds kEvery{100};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

absl::StatusOr<int> Serve(AttentionFlags flags, const SignalWaiter& signals) {
  RETURN_IF_ERROR(FinishWorkerFlags("prefill", &flags.worker));
  ASSIGN_OR_RETURN(auto transport, OpenUcx(flags.worker));
  SystemClock clock;
  WorkerHostOptions host_options;
  host_options.role = "prefill";
  host_options.flags = flags.worker;
  ASSIGN_OR_RETURN(auto host, WorkerHost::Start(host_options, &signals, &clock));
  ASSIGN_OR_RETURN(auto worker, AttentionWorker::Create(flags, std::move(transport)));

  std::unique_ptr<PrefillCore> core;
  HandoffSenderOptions options;
  options.name = flags.worker.name;
  options.epoch = worker->epoch();
  options.identity = worker->identity();
  options.layout = worker->model().state_layout();
  options.idle_max = absl::Seconds(flags.handoff_seconds);
  options.stall_max = host_options.stall_max;
  HandoffSender sender(&worker->transport(), &clock, options, [&](HandoffSent result) {
    host->Post(
        [&core, result = std::move(result)](absl::Time now) { core->OnHandoffSent(result, now); });
  });
  PrefillOptions core_options;
  core_options.requests_max = flags.requests;
  core_options.clock = &clock;
  core_options.kda_index = KdaIndexOfLayers(worker->model().config());
  core = std::make_unique<PrefillCore>(
      std::move(core_options), worker->MakeRegister(mesh::ROLE_PREFILL), &worker->engine(), &sender,
      [&](const mesh::MeshView& view) { worker->SetView(view); });
  auto lines = worker->Describe();
  for (auto& line : DescribeHost(host_options)) lines.push_back(std::move(line));
  lines.emplace_back("hand-offs open", std::to_string(options.transfers_max));
  lines.emplace_back("segment", absl::StrFormat("%d KiB", options.segment_bytes_max >> 10));
  lines.emplace_back("segments in flight",
                     absl::StrFormat("%d per hand-off", options.segments_in_flight_max));
  PrintConfiguration("deltamesh prefill", lines);

  WorkerHost::Role role;
  role.core = core.get();
  role.transport = &worker->transport();
  role.ready = [&] { return worker->ExpertsReady(); };
  role.metrics = [&] { return worker->Metrics(); };
  int code = 0;
  {
    const KeepAliveThread alive(&sender, &clock);
    code = host->Run(role);
  }
  core.reset();
  worker->StopTransport();
  return code;
}

}  // namespace

int RunPrefill(AttentionFlags flags) {
  const SignalWaiter signals;
  InitLog("prefill", ParseLogLevel(flags.worker.log_level));
  if (flags.worker.parent != 0) DieWithParent(static_cast<pid_t>(flags.worker.parent));
  absl::StatusOr<int> code = Serve(std::move(flags), signals);
  if (code.ok()) return *code;
  LogError("prefill.failed_to_start", {{"error", code.status().ToString()}});
  return 1;
}

}  // namespace deltamesh
