#include "services/worker/connection_meter.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr std::chrono::seconds kAfter{1};
constexpr size_t kQueueMax = 4096;

}  // namespace

ConnectionMeter::ConnectionMeter(Transport* transport, int64_t expect_mb, Measured measured)
    : transport_(transport),
      expected_bytes_per_second_(static_cast<double>(expect_mb) * 1e6),
      measured_(std::move(measured)),
      probe_(transport),
      thread_([this] { Run(); }) {}

void ConnectionMeter::Add(PeerId peer, const std::string& name, uint64_t epoch) {
  std::lock_guard lock(mutex_);
  if (queue_.size() >= kQueueMax) return;  // it counts as the best of the mesh
  queue_.push_back({peer, name, epoch, std::chrono::steady_clock::now() + kAfter});
  changed_.notify_all();
}

void ConnectionMeter::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  probe_.Stop();
  if (thread_.joinable()) thread_.join();
}

void ConnectionMeter::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const Connection next = std::move(queue_.front());
    queue_.pop_front();
    if (changed_.wait_until(lock, next.due, [this] { return stop_; })) return;
    lock.unlock();
    Measure(next);
    lock.lock();
  }
}

void ConnectionMeter::Measure(const Connection& connection) {
  const BandwidthProbeOptions options;
  const absl::StatusOr<BandwidthResult> result = probe_.Measure(connection.peer, options);
  if (result.ok()) {
    measured_(connection.name, connection.epoch, result->bytes_per_second);
    return ReportBandwidth(connection.name, transport_->lanes(), *result,
                           expected_bytes_per_second_);
  }
  if (absl::IsCancelled(result.status()) || absl::IsUnavailable(result.status())) return;
  // It answered at first and then not in time: slower than anything.
  const bool late = absl::IsDeadlineExceeded(result.status());
  if (late) {
    measured_(connection.name, connection.epoch,
              static_cast<double>(options.payload_bytes * options.payloads) /
                  absl::ToDoubleSeconds(options.timeout));
  }
  const bool slow = late && expected_bytes_per_second_ > 0;
  Log(slow ? LogLevel::kWarning : LogLevel::kInfo, slow ? "transport.slow" : "transport.unmeasured",
      {{"peer", connection.name},
       {"lanes", transport_->lanes()},
       {"reason", MessageOf(result.status())}});
}

}  // namespace deltamesh
