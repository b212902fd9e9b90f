#include "services/prefill/prefill_server.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime/base/status.h"
#include "runtime/transfer/handoff_sender.h"
#include "services/prefill/prefill_core.h"
#include "services/worker/attention_process.h"
#include "services/worker/worker_process.h"

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

absl::StatusOr<int> Serve(const AttentionFlags& flags, const SignalWaiter& signals) {
  ASSIGN_OR_RETURN(auto process, AttentionProcess::Start("prefill", flags, signals));
  AttentionWorker& worker = process->worker();
  std::unique_ptr<PrefillCore> core;
  HandoffSenderOptions options;
  options.name = process->flags().worker.name;
  options.epoch = worker.epoch();
  options.identity = worker.identity();
  options.layout = worker.model().state_layout();
  options.idle_max = absl::Seconds(flags.handoff_seconds);
  options.stall_max = process->host_options().stall_max;
  HandoffSender sender(&worker.transport(), process->clock(), options, [&](HandoffSent result) {
    process->host().Post(
        [&core, result = std::move(result)](absl::Time now) { core->OnHandoffSent(result, now); });
  });
  PrefillOptions core_options;
  core_options.requests_max = flags.requests;
  core_options.clock = process->clock();
  core_options.kda_index = KdaIndexOfLayers(worker.model().config());
  core_options.cache = worker.cache();
  core_options.tier = worker.tier();
  core = std::make_unique<PrefillCore>(
      std::move(core_options), worker.MakeRegister(mesh::ROLE_PREFILL), &worker.engine(), &sender,
      [&](const mesh::MeshView& view) { worker.SetView(view); });
  int code = 0;
  {
    const KeepAliveThread alive(&sender, process->clock());
    code = process->Run(core.get(),
                        {{"hand-offs open", std::to_string(options.transfers_max)},
                         {"segment", absl::StrFormat("%d KiB", options.segment_bytes_max >> 10)},
                         {"segments in flight",
                          absl::StrFormat("%d per hand-off", options.segments_in_flight_max)}});
  }
  core.reset();
  worker.StopTransport();
  return code;
}

}  // namespace

AttentionFlags PrefillDefaults() {
  AttentionFlags flags;
  flags.engine.chunk_tokens_max = flags.engine.step_tokens_max;
  return flags;
}

int RunPrefill(AttentionFlags flags) {
  return RunWorker("prefill", flags.worker,
                   [&](const SignalWaiter& signals) { return Serve(flags, signals); });
}

}  // namespace deltamesh
