// The process around a worker's core: one thread that owns the core, with an inbox in front; links to the
// routers; gRPC port (health, reflection); HTTP port (/metrics, /healthz, /readyz); signals and drain.
//
// The core's thread is busy for the length of a step. So that a long step is not taken for a dead worker,
// the thread that waits for signals repeats the last heartbeats meanwhile - up to `stall_max`: beyond it the
// worker counts as hung and its leases run out.
//
// Thread-safe where said; the rest belongs to the main thread.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "runtime/base/clock.h"
#include "runtime/transfer/transport.h"
#include "services/common/flags.h"
#include "services/common/grpc_server.h"
#include "services/common/http_ops.h"
#include "services/common/link_client.h"
#include "services/common/mailbox.h"
#include "services/common/metrics.h"
#include "services/common/process.h"
#include "services/worker/worker_core.h"

namespace deltamesh {

struct WorkerHostOptions {
  std::string role;             // label of every series, component of every log line
  WorkerFlags flags;            // checked by FinishWorkerFlags
  int64_t inbox_max = 1 << 16;  // messages waiting for the core; beyond it a link is closed
  absl::Duration tick = absl::Milliseconds(20);
  absl::Duration stall_max = absl::Seconds(60);
  // A draining worker stays this long after its last work, for routers to hear of it and send no more.
  absl::Duration linger = absl::Milliseconds(300);
  LinkOptions link;
};

// The bounds of the host itself, for the configuration printed at start.
std::vector<std::pair<std::string, std::string>> DescribeHost(const WorkerHostOptions& options);

class WorkerHost {
 public:
  // Opens both ports; nothing is ready yet. A signal until Run ends the process at once.
  static absl::StatusOr<std::unique_ptr<WorkerHost>> Start(WorkerHostOptions options,
                                                           const SignalWaiter* signals,
                                                           const Clock* clock);
  ~WorkerHost();

  // Runs `event` on the core's thread soon. Thread-safe; false once the worker ends.
  bool Post(std::function<void(absl::Time now)> event);

  Metrics* metrics() { return metrics_.get(); }
  const Clock* clock() const { return clock_; }
  std::string grpc_address() const { return grpc_->address(); }
  std::string http_address() const;

  struct Role {
    WorkerCore* core = nullptr;
    // Why the worker cannot do its work although it is registered. Thread-safe; may be null.
    std::function<absl::Status()> ready;
    // Samples of what is around the core. Thread-safe; may be null.
    std::function<std::vector<MetricSample>()> metrics;
    // Its use is exported, and the lanes it selects are logged. May be null.
    const Transport* transport = nullptr;
  };
  // Dials the routers and serves until SIGINT or SIGTERM, then drains: refuses new work, waits for the
  // running up to the flag's seconds, delivers what was said to routers, stops. Returns the exit code.
  int Run(const Role& role);

 private:
  using Event = std::function<void(absl::Time now)>;

  WorkerHost(WorkerHostOptions options, const SignalWaiter* signals, const Clock* clock);
  absl::Status OpenPorts();
  void WatchSignalsWhileLoading();
  LinkClientEvents LinkEvents();
  void Loop();
  void Flush();
  void PublishMetrics();
  void RepeatHeartbeats();
  void RefreshSeries();
  void LogLanes();
  absl::Status Ready() const;
  void Serve();

  const WorkerHostOptions options_;
  const SignalWaiter* const signals_;
  const Clock* const clock_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<HttpOps> ops_;
  std::unique_ptr<GrpcServer> grpc_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<LinkClient> links_;
  Mailbox<Event> inbox_;
  Role role_;
  std::thread loop_;
  std::thread loading_watch_;
  std::atomic<bool> loading_ = true;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> idle_ = true;
  std::atomic<bool> registered_ = false;
  std::atomic<bool> draining_ = false;
  std::atomic<bool> drained_ = false;     // the core knows
  std::atomic<int64_t> progress_ns_ = 0;  // when the loop last came round
  std::atomic<int64_t> worked_ns_ = 0;    // when it last had work, or heard of the drain

  mutable absl::Mutex mu_;
  std::vector<MetricSample> samples_ ABSL_GUARDED_BY(mu_);  // of the core, as of the last tick
  std::map<LinkId, mesh::Heartbeat> heartbeats_ ABSL_GUARDED_BY(mu_);  // the last one per link
  // Series kept in step with samples; touched by expositions only, one at a time.
  absl::Mutex series_mu_;
  std::map<std::string, CounterFollower> followers_ ABSL_GUARDED_BY(series_mu_);
  std::map<std::string, prometheus::Gauge*> gauges_ ABSL_GUARDED_BY(series_mu_);  // last exposed
  prometheus::Histogram* step_seconds_ = nullptr;
  std::string lanes_;  // as last logged
};

}  // namespace deltamesh
