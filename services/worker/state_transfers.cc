#include "services/worker/state_transfers.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime/base/status.h"

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

}  // namespace

StateTransfers::StateTransfers(AttentionProcess* process, std::unique_ptr<StateWorkerCore>* core)
    : process_(process), core_(core) {
  AttentionWorker& worker = process->worker();
  Transport* const transport = &worker.transport();
  WorkerHost* const host = &process->host();
  sending_.name = receiving_.name = process->flags().worker.name;
  sending_.epoch = receiving_.epoch = worker.epoch();
  sending_.identity = receiving_.identity = worker.identity();
  sending_.layout = receiving_.layout = worker.model().state_layout();
  sending_.idle_max = receiving_.idle_max = absl::Seconds(process->flags().handoff_seconds);
  sending_.stall_max = process->host_options().stall_max;
  meter_ = std::make_unique<ConnectionMeter>(
      transport, process->flags().transport_expect_mb,
      [host, core](const std::string& to, uint64_t epoch, double bytes_per_second) {
        host->Post([core, to, epoch, bytes_per_second](absl::Time) {
          (*core)->OnConnectionMeasured(to, epoch, bytes_per_second);
        });
      });
  sending_.on_connected = [meter = meter_.get()](PeerId peer, const std::string& receiver,
                                                 uint64_t epoch) {
    meter->Add(peer, receiver, epoch);
  };
  sender_ = std::make_unique<HandoffSender>(
      transport, process->clock(), sending_, [host, core](HandoffSent result) {
        host->Post([core, result = std::move(result)](absl::Time now) {
          (*core)->OnHandoffSent(result, now);
        });
      });
  receiver_ = std::make_unique<HandoffReceiver>(
      transport, process->clock(), &entropy_, receiving_, [host, core](HandoffEvent event) {
        // A closure must be copyable; an event owns a state.
        auto shared = std::make_shared<HandoffEvent>(std::move(event));
        host->Post(
            [core, shared](absl::Time now) { (*core)->OnHandoffEvent(std::move(*shared), now); });
      });
  fetch_ = std::make_unique<FetchPort>(transport, [host, core](FetchEvent event) {
    host->Post(
        [core, event = std::move(event)](absl::Time now) { (*core)->OnFetchEvent(event, now); });
  });
}

StateTransfers::~StateTransfers() = default;

int StateTransfers::Run(std::vector<std::pair<std::string, std::string>> bounds) {
  std::vector<std::pair<std::string, std::string>> lines = {
      {"hand-offs open", std::to_string(sending_.transfers_max)},
      {"landing-unclaimed-seconds",
       absl::StrFormat("%g", absl::ToDoubleSeconds(receiving_.unclaimed_max))},
      {"segment", absl::StrFormat("%d KiB", sending_.segment_bytes_max >> 10)},
      {"segments in flight", absl::StrFormat("%d per hand-off", sending_.segments_in_flight_max)}};
  for (auto& line : bounds) lines.push_back(std::move(line));
  int code = 0;
  {
    const KeepAliveThread alive(sender_.get(), process_->clock());
    code = process_->Run(core_->get(), std::move(lines));
  }
  meter_->Stop();
  core_->reset();
  process_->worker().StopTransport();
  return code;
}

}  // namespace deltamesh
