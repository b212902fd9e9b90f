#include "services/worker/worker_host.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/worker/metric_list.h"

namespace deltamesh {

std::vector<std::pair<std::string, std::string>> DescribeHost(const WorkerHostOptions& o) {
  return {{"inbox", absl::StrFormat("%d messages", o.inbox_max)},
          {"stall", absl::FormatDuration(o.stall_max)},
          {"drain linger", absl::FormatDuration(o.linger)},
          {"link queue", absl::StrFormat("%d messages", o.link.queue_max)},
          {"link flush", absl::FormatDuration(kLinkFlushMax)},
          {"link message", absl::StrFormat("%d MiB", o.link.message_bytes_max >> 20)},
          {"link redial",
           absl::StrFormat("at most every %s", absl::FormatDuration(o.link.backoff_max))}};
}

absl::StatusOr<std::unique_ptr<WorkerHost>> WorkerHost::Start(WorkerHostOptions options,
                                                              const SignalWaiter* signals,
                                                              const Clock* clock) {
  std::unique_ptr<WorkerHost> host(new WorkerHost(std::move(options), signals, clock));
  RETURN_IF_ERROR(host->OpenPorts());
  host->loading_watch_ = std::thread([h = host.get()] { h->WatchSignalsWhileLoading(); });
  return host;
}

WorkerHost::WorkerHost(WorkerHostOptions options, const SignalWaiter* signals, const Clock* clock)
    : options_(std::move(options)),
      signals_(signals),
      clock_(clock),
      metrics_(std::make_unique<Metrics>(
          MetricLabels{{"role", options_.role}, {"worker", options_.flags.name}})),
      inbox_(static_cast<size_t>(options_.inbox_max)) {
  if (options_.role != "expert") {  // a shard computes calls, not steps
    step_seconds_ = &metrics_->Histogram("deltamesh_step_seconds", "Duration of one engine step.",
                                         LatencyBuckets());
  }
  ops_ = std::make_unique<HttpOps>(
      metrics_.get(), [this] { return Ready(); }, [this] { RefreshSeries(); });
}

WorkerHost::~WorkerHost() {
  http_.reset();  // first: an exposition that runs looks at the other members
  loading_ = false;
  if (loading_watch_.joinable()) loading_watch_.join();
}

absl::Status WorkerHost::OpenPorts() {
  GrpcServerOptions grpc;
  grpc.listen = options_.flags.listen;
  grpc.health_names = {"deltamesh." + options_.role};
  ASSIGN_OR_RETURN(grpc_, GrpcServer::Start(grpc, {}));
  ASSIGN_OR_RETURN(auto http_at, ParseHostPort("--http", options_.flags.http));
  HttpOptions http;
  http.address = http_at.first;
  http.port = http_at.second;
  http.threads = 1;
  ASSIGN_OR_RETURN(http_, HttpServer::Start(http, ops_.get()));
  return absl::OkStatus();
}

std::string WorkerHost::http_address() const { return http_->address(); }

// Loading cannot be interrupted half way, and nothing has been promised to anyone yet.
void WorkerHost::WatchSignalsWhileLoading() {
  while (loading_) {
    if (const int signal_number = signals_->Wait(absl::Milliseconds(100)); signal_number != 0) {
      LogInfo("worker.stopped", {{"signal", signal_number}, {"while", "loading"}});
      std::_Exit(0);
    }
  }
}

bool WorkerHost::Post(Event event) { return inbox_.PushAlways(std::move(event)); }

LinkClientEvents WorkerHost::LinkEvents() {
  LinkClientEvents events;
  events.opened = [this](LinkId link, const std::string& target) {
    LogInfo("link.opened", {{"router", target}});
    Post([this, link](absl::Time now) { role_.core->OnLinkOpened(link, now); });
  };
  events.message = [this](LinkId link, mesh::RouterMessage message) {
    const bool taken = inbox_.Push([this, link, message = std::move(message)](absl::Time now) {
      role_.core->OnRouterMessage(link, message, now);
    });
    // Refused by the end of the loop it is nobody's. The link must not be closed for that: the last
    // answers are on their way on it.
    return taken || stop_;
  };
  events.closed = [this](LinkId link, absl::Status reason) {
    LogWarning("link.closed", {{"reason", reason.ToString()}});
    {
      absl::MutexLock lock(&mu_);
      heartbeats_.erase(link);
    }
    Post([this, link](absl::Time now) { role_.core->OnLinkClosed(link, now); });
  };
  return events;
}

int WorkerHost::Run(const Role& role) {
  role_ = role;
  loading_ = false;
  loading_watch_.join();
  links_ = std::make_unique<LinkClient>(options_.flags.routers, options_.link, LinkEvents());
  progress_ns_ = absl::ToUnixNanos(clock_->Now());
  loop_ = std::thread([this] { Loop(); });
  links_->Start();
  LogInfo("worker.up",
          {{"name", options_.flags.name}, {"grpc", grpc_address()}, {"http", http_address()}});
  if (!options_.flags.ports_file.empty()) {
    const absl::Status written = WriteKeyValues(
        options_.flags.ports_file, {{"grpc", grpc_address()}, {"http", http_address()}});
    if (!written.ok()) LogError("worker.ports_file", {{"error", written.ToString()}});
  }
  Serve();

  stop_ = true;  // before the inbox refuses anything
  inbox_.Close();
  loop_.join();
  links_->Stop();
  grpc_->Shutdown(absl::ZeroDuration());
  http_.reset();
  LogInfo("worker.stopped", {{"idle", idle_.load()}});
  return 0;
}

// Until a signal, and through the drain after it.
void WorkerHost::Serve() {
  bool serving = false;
  absl::Time drain_until = absl::InfiniteFuture();
  while (clock_->Now() < drain_until) {
    if (drained_ && idle_ && clock_->Now() - absl::FromUnixNanos(worked_ns_) > options_.linger) {
      return;
    }
    if (options_.flags.parent != 0 && getppid() != options_.flags.parent) {
      LogError("worker.parent_died", {});
      return;
    }
    const int signal_number =
        signals_->Wait(draining_ ? absl::Milliseconds(20) : absl::Milliseconds(250));
    if (signal_number != 0 && draining_) return;  // asked twice: now
    if (signal_number != 0) {
      LogInfo("worker.draining", {{"signal", signal_number}});
      draining_ = true;
      grpc_->SetServing(false);
      drain_until = clock_->Now() + absl::Seconds(options_.flags.drain_seconds);
      Post([this](absl::Time now) {
        role_.core->Drain(now);
        worked_ns_ = absl::ToUnixNanos(now);
        idle_ = false;  // until the loop has looked again
        drained_ = true;
      });
    }
    const bool ready = Ready().ok();
    if (ready != serving) {
      serving = ready;
      grpc_->SetServing(serving);
      LogInfo(serving ? "worker.ready" : "worker.not_ready", {});
    }
    RepeatHeartbeats();
    LogLanes();
  }
  LogWarning("worker.drain_ended", {{"seconds", options_.flags.drain_seconds}});
}

absl::Status WorkerHost::Ready() const {
  if (loading_) return Unavailable("loading the model");
  if (draining_) return Unavailable("draining");
  if (!registered_) return Unavailable("no router has accepted the registration yet");
  return role_.ready ? role_.ready() : absl::OkStatus();
}

void WorkerHost::Loop() {
  absl::Time next_tick = clock_->Now();
  bool busy = false;
  while (!stop_) {
    for (Event& event : inbox_.TakeAll(busy ? absl::ZeroDuration() : options_.tick)) {
      event(clock_->Now());
    }
    const absl::Time now = clock_->Now();
    progress_ns_ = absl::ToUnixNanos(now);
    if (now >= next_tick) {
      next_tick = now + options_.tick;
      role_.core->Tick(now);
      PublishMetrics();
    }
    Flush();
    busy = role_.core->Step(clock_->Now());
    const std::optional<absl::Duration> step_time = role_.core->StepTime();
    if (step_time && step_seconds_ != nullptr) {
      step_seconds_->Observe(absl::ToDoubleSeconds(*step_time));
    }
    Flush();
    const bool idle = role_.core->Idle() && inbox_.size() == 0;
    // First, so that who finds it idle finds since when. What a step began and ended counts too.
    if (busy || !idle) worked_ns_ = absl::ToUnixNanos(clock_->Now());
    idle_ = idle;
  }
}

void WorkerHost::Flush() {
  for (SendToRouter& action : role_.core->TakeActions()) {
    const bool beat = action.message.has_heartbeat();
    if (beat) {
      absl::MutexLock lock(&mu_);
      heartbeats_[action.link] = action.message.heartbeat();
    }
    if (!links_->Send(action.link, std::move(action.message)) && beat) {
      absl::MutexLock lock(&mu_);
      heartbeats_.erase(action.link);
    }
  }
}

void WorkerHost::RepeatHeartbeats() {
  const absl::Time now = clock_->Now();
  const absl::Duration stalled = now - absl::FromUnixNanos(progress_ns_);
  if (stalled < absl::Milliseconds(400) || stalled > options_.stall_max) return;
  std::map<LinkId, mesh::Heartbeat> beats;
  {
    absl::MutexLock lock(&mu_);
    beats = heartbeats_;
  }
  for (auto& [link, beat] : beats) {
    mesh::WorkerMessage message;
    *message.mutable_heartbeat() = std::move(beat);
    links_->Send(link, std::move(message));
  }
}

void WorkerHost::PublishMetrics() {
  registered_ = role_.core->Registered();
  std::vector<MetricSample> samples = role_.core->Metrics();
  absl::MutexLock lock(&mu_);
  samples_ = std::move(samples);
}

// The selection is known once something is connected, and may change with the next peer.
void WorkerHost::LogLanes() {
  if (role_.transport == nullptr) return;
  std::string lanes = role_.transport->lanes();
  if (lanes == lanes_) return;
  LogInfo("transport.lanes", {{"kind", role_.transport->kind()}, {"lanes", lanes}});
  lanes_ = std::move(lanes);
}

void WorkerHost::RefreshSeries() {
  if (loading_) return;
  MetricList around;
  if (role_.transport != nullptr) around.TransportUse(*role_.transport);
  std::vector<MetricSample> samples = around.Take();
  {
    absl::MutexLock lock(&mu_);
    samples.insert(samples.end(), samples_.begin(), samples_.end());
  }
  if (role_.metrics) {
    for (MetricSample& sample : role_.metrics()) samples.push_back(std::move(sample));
  }
  absl::MutexLock lock(&series_mu_);
  std::map<std::string, prometheus::Gauge*> gauges;
  for (const MetricSample& sample : samples) {
    const std::string name = "deltamesh_" + sample.name;
    const MetricLabels labels(sample.labels.begin(), sample.labels.end());
    std::string key = name;
    for (const auto& [label, value] : labels) key += '\0' + label + '\0' + value;
    if (sample.kind == MetricSample::Kind::kGauge) {
      prometheus::Gauge& gauge = metrics_->Gauge(name, sample.help, labels);
      gauge.Set(sample.value);
      gauges[std::move(key)] = &gauge;
      continue;
    }
    auto it = followers_.find(key);
    if (it == followers_.end()) {
      CounterFollower follower(metrics_->Counter(name, sample.help, labels));
      it = followers_.emplace(std::move(key), follower).first;
    }
    it->second.Set(sample.value);
  }
  // A series that is no longer reported (other lanes, say) must not keep its last value.
  for (const auto& [key, gauge] : gauges_) {
    if (!gauges.contains(key)) gauge->Set(0);
  }
  gauges_ = std::move(gauges);
}

}  // namespace deltamesh
