#include "services/router/router_process.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/str_replace.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/text/text_digest.h"
#include "services/common/flag_range.h"
#include "services/common/flags.h"
#include "services/common/grpc_server.h"
#include "services/common/http_ops.h"
#include "services/common/link_server.h"
#include "services/common/process.h"
#include "services/router/inference_service.h"
#include "services/router/openai_http.h"
#include "services/router/operations_service.h"
#include "services/router/router_server.h"
#include "services/router/span_exporter.h"

namespace deltamesh {
namespace {

// At the end, for the last bytes of answers to leave.
constexpr absl::Duration kFlushMax = absl::Seconds(1);
// After the last answer, for what was said to reach the stores.
constexpr absl::Duration kSettleMax = absl::Seconds(5);
// Of flags.
constexpr double kStoreForgetMinutesMin = 0.1;  // above kRedialMax
constexpr double kStoreForgetMinutesMax = 366.0 * 24 * 60;
constexpr double kSecondsMin = 1e-3, kSecondsMax = 1e9;
constexpr int64_t kCountMax = int64_t{1} << 40, kThreadsMax = 1024;

LinkServerEvents LinkEventsOf(RouterServer* router) {
  LinkServerEvents events;
  events.opened = [router](LinkId link, const std::string& peer) {
    LogInfo("link.opened", {{"link", link}, {"peer", peer}});
    router->OnLinkOpened(link);
  };
  events.message = [router](LinkId link, mesh::WorkerMessage message) {
    return router->OnLinkMessage(link, std::move(message));
  };
  events.closed = [router](LinkId link, absl::Status reason) {
    router->OnLinkClosed(link, std::move(reason));
  };
  return events;
}

// Everything a router process owns. Members are destroyed in reverse: the ports first, then what they
// call.
class RouterProcess {
 public:
  explicit RouterProcess(RouterFlags flags) : flags_(std::move(flags)) {}
  // Also after a start that failed half way: the router's thread uses what is destroyed before it.
  ~RouterProcess() {
    if (router_ != nullptr) router_->Stop();
  }

  absl::Status Start() {
    ASSIGN_OR_RETURN(front_, Front::Load(flags_.front, &entropy_));
    flags_.core.epoch = static_cast<uint64_t>(absl::ToUnixNanos(clock_.Now()));
    flags_.core.identity.set_digest(flags_.digest);
    flags_.core.vocab = front_->model_info().vocab_size();
    ASSIGN_OR_RETURN(const std::string text_digest, TextDigest(flags_.model));
    flags_.core.identity.set_text_digest(text_digest);
    metrics_ = std::make_unique<Metrics>(MetricLabels{{"role", "router"}});
    router_ = std::make_unique<RouterServer>(RouterServerOptions{.core = flags_.core}, &clock_,
                                             metrics_.get());
    SpanExporterOptions spans;
    spans.endpoint = flags_.trace_endpoint;
    spans.router = flags_.core.name;
    spans_ = std::make_unique<SpanExporter>(std::move(spans), metrics_.get());
    router_->OnConcluded([this](const Decision& decision) { spans_->Add(decision); });
    pool_ = std::make_unique<EncodePool>(flags_.encode);  // given to those below, gone before them
    links_ = std::make_unique<LinkServer>(LinkOptions{}, LinkEventsOf(router_.get()));
    operations_ = std::make_unique<OperationsService>(router_.get());
    inference_ = std::make_unique<InferenceService>(front_.get(), router_.get(), pool_.get());
    openai_ = std::make_unique<OpenAiHttp>(front_.get(), router_.get(), pool_.get());
    ops_ = std::make_unique<HttpOps>(
        metrics_.get(), [this] { return Ready(); }, [] {}, openai_.get());
    GrpcServerOptions grpc;
    grpc.listen = flags_.listen;
    grpc.health_names = {"deltamesh.v1.Inference", "deltamesh.router"};
    grpc.own_thread = false;
    ASSIGN_OR_RETURN(
        grpc_, GrpcServer::Start(grpc, {links_->service(), inference_.get(), operations_.get()}));
    router_->Start(
        {.send = [this](LinkId link, const mesh::RouterMessage& m) { links_->Send(link, m); },
         .close = [this](LinkId link, const absl::Status& s) { links_->Close(link, s); }},
        {.wait = [this](absl::Duration wait) { return grpc_->Poll(wait); },
         .wake = [this] { grpc_->Wake(); }});
    ASSIGN_OR_RETURN(auto http_at, ParseHostPort("--http", flags_.http));
    flags_.http_options.address = http_at.first;
    flags_.http_options.port = http_at.second;
    ASSIGN_OR_RETURN(http_, HttpServer::Start(flags_.http_options, ops_.get()));
    Print();
    if (flags_.ports_file.empty()) return absl::OkStatus();
    return WriteKeyValues(flags_.ports_file,
                          {{"grpc", grpc_->address()}, {"http", http_->address()}});
  }

  void Serve(const SignalWaiter& signals) {
    bool serving = false;
    while (true) {
      if (const int number = signals.Wait(absl::Milliseconds(100)); number != 0) {
        LogInfo("router.signal", {{"signal", number}});
        return;
      }
      if (flags_.parent != 0 && getppid() != flags_.parent) {
        LogError("router.parent_died");
        return;
      }
      const absl::Status ready = Ready();
      if (ready.ok() == serving) continue;
      serving = ready.ok();
      grpc_->SetServing(serving);
      LogInfo(serving ? "router.ready" : "router.not_ready", {{"reason", MessageOf(ready)}});
    }
  }

  // New calls find nobody serving; running answers get their time.
  void Drain(const SignalWaiter& signals) {
    draining_ = true;
    router_->Drain();
    grpc_->SetServing(false);
    const absl::Time until = clock_.Now() + absl::Seconds(flags_.drain_seconds);
    LogInfo("router.draining",
            {{"requests", router_->unfinished()}, {"seconds_max", flags_.drain_seconds}});
    while (router_->unfinished() > 0 && clock_.Now() < until) {
      if (signals.Wait(absl::Milliseconds(20)) != 0) break;  // asked twice: now
    }
    const absl::Time settled = std::min(until, clock_.Now() + kSettleMax);
    do {
      if (signals.Wait(absl::Milliseconds(150)) != 0) break;  // the snapshot is as old as a tick
    } while (router_->snapshot().gauges.sessions_unsettled > 0 && clock_.Now() < settled);
    LogInfo("router.drained", {{"requests_left", router_->unfinished()}});
  }

  // What still runs ends with UNAVAILABLE; all that was said has kFlushMax to leave each port.
  void Stop() {
    router_->Stop();
    http_->Drain(kFlushMax);
    links_->CloseAll(Unavailable("router \"%s\" is stopping", flags_.core.name));
    grpc_->Shutdown(kFlushMax);
    http_.reset();
    LogInfo("router.stopped");
  }

 private:
  absl::Status Ready() const {
    if (draining_) return Unavailable("the router is draining");
    return router_->snapshot().ready;
  }

  void Print() const {
    std::vector<std::pair<std::string, std::string>> lines = {
        {"model", flags_.model},
        {"model_name", front_->model_info().name()},
        {"family", front_->model_info().family()},
        {"random_weights", front_->model_info().random_weights() ? "yes: answers are noise" : "no"},
        {"grpc", grpc_->address()},
        {"http", http_->address()},
        {"drain_seconds", absl::StrFormat("%g", flags_.drain_seconds)},
        {"flush_max", absl::FormatDuration(kFlushMax)},
        {"text_bytes_max", std::to_string(flags_.front.text_bytes_max)},
        {"logit_bias_max", std::to_string(flags_.front.logit_bias_max)},
        {"stop_token_ids_max", std::to_string(flags_.front.stop_token_ids_max)},
        {"stop_strings_max", std::to_string(kMaxStopStrings)},
        {"stop_string_bytes_max", std::to_string(kMaxStopStringBytes)},
        {"logprobs_max", std::to_string(flags_.front.logprobs_max)},
        {"encode_threads", std::to_string(flags_.encode.threads)},
        {"encode_queue_max", std::to_string(flags_.encode.queue_max)},
        {"encode_aside_max", std::to_string(flags_.encode.aside_max)},
        {"encode_inline_bytes_max", std::to_string(flags_.encode.inline_bytes_max)},
        {"mailbox_max", std::to_string(RouterServerOptions{}.mailbox_max)},
        {"link_queue_max", std::to_string(LinkOptions{}.queue_max)},
        {"link_message_bytes_max", std::to_string(LinkOptions{}.message_bytes_max)},
        {"grpc_unread_events_max", std::to_string(InferenceService::kUnreadEventsMax)},
        {"http_threads", std::to_string(flags_.http_options.threads)},
        {"http_connections_max", std::to_string(flags_.http_options.connections_max)},
        {"http_body_bytes_max", std::to_string(flags_.http_options.body_bytes_max)},
        {"http_reading_bytes_max", std::to_string(flags_.http_options.reading_bytes_max)},
        {"http_header_bytes_max", std::to_string(flags_.http_options.header_bytes_max)},
        {"http_unread_bytes_max", std::to_string(flags_.http_options.unread_bytes_max)},
        {"http_read_max", absl::FormatDuration(flags_.http_options.read_max)},
        {"http_write_max", absl::FormatDuration(flags_.http_options.write_max)},
        {"http_idle_max", absl::FormatDuration(flags_.http_options.idle_max)}};
    const SpanExporterOptions spans;
    lines.insert(lines.end(), {{"trace_endpoint",
                                flags_.trace_endpoint.empty() ? "none" : flags_.trace_endpoint},
                               {"spans_queue_max", std::to_string(spans.queue_max)},
                               {"spans_batch_max", std::to_string(spans.batch_max)},
                               {"spans_call_max", absl::FormatDuration(spans.call_max)}});
    for (auto& line : flags_.core.Describe()) lines.push_back(std::move(line));
    PrintConfiguration("deltamesh router", lines);
  }

  RouterFlags flags_;
  SystemClock clock_;
  SystemEntropy entropy_;
  std::atomic<bool> draining_ = false;
  std::unique_ptr<const Front> front_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<SpanExporter> spans_;  // the router's thread adds to it
  std::unique_ptr<RouterServer> router_;
  std::unique_ptr<LinkServer> links_;
  std::unique_ptr<OperationsService> operations_;
  std::unique_ptr<InferenceService> inference_;
  std::unique_ptr<OpenAiHttp> openai_;
  std::unique_ptr<HttpOps> ops_;
  std::unique_ptr<EncodePool>
      pool_;  // its jobs use the services above, and only the ports below post any
  std::unique_ptr<GrpcServer> grpc_;
  std::unique_ptr<HttpServer> http_;
};

// Relations of bounds as whoever started the router knows them: by their flags, of which each has a range.
absl::Status CheckBounds(const RouterOptions& core) {
  const absl::Status status = core.Validate();
  if (status.ok()) return status;
  const std::string named =
      absl::StrReplaceAll(MessageOf(status), {{"waiting_requests_max", "--waiting-requests"},
                                              {"live_requests_max", "--live-requests"},
                                              {"lease:", "--lease-seconds:"}});
  return absl::Status(status.code(), named);
}

absl::Status Run(RouterFlags flags, const SignalWaiter& signals) {
  RETURN_IF_ERROR(CheckProcessName(flags.core.name));
  RETURN_IF_ERROR(CheckListen("--listen", flags.listen));
  RETURN_IF_ERROR(CheckListen("--http", flags.http));
  RETURN_IF_ERROR(CheckFileToWrite("--ports-file", flags.ports_file));
  if (!flags.trace_endpoint.empty()) {
    ASSIGN_OR_RETURN(const auto at, ParseHostPort("--trace-endpoint", flags.trace_endpoint));
    if (at.second == 0) {
      return InvalidArgument("--trace-endpoint: \"%s\" has port 0; name the collector's",
                             flags.trace_endpoint);
    }
  }
  flags.front.model = flags.model;
  const auto disaggregation = DisaggregationNamed(flags.disaggregate);
  if (!disaggregation) {
    return InvalidArgument("--disaggregate: \"%s\" is not known; use planned, always or never",
                           flags.disaggregate);
  }
  flags.core.disaggregation = *disaggregation;
  flags.core.waiting_max = absl::Seconds(flags.waiting_seconds);
  flags.core.ageing_max = absl::Seconds(flags.ageing_seconds);
  flags.core.request_max = absl::Seconds(flags.request_seconds);
  flags.core.session_bytes_max = flags.session_mib << 20;
  flags.core.store_forget = absl::Minutes(flags.store_forget_minutes);
  flags.core.heartbeat = absl::Seconds(flags.heartbeat_seconds);
  flags.core.lease = absl::Seconds(flags.lease_seconds);
  flags.core.waiting_requests_max =
      flags.waiting_requests > 0
          ? flags.waiting_requests
          : std::min(flags.core.waiting_requests_max, flags.core.live_requests_max);
  RETURN_IF_ERROR(CheckBounds(flags.core));
  RouterProcess process(std::move(flags));
  RETURN_IF_ERROR(process.Start());
  process.Serve(signals);
  process.Drain(signals);
  process.Stop();
  return absl::OkStatus();
}

}  // namespace

void AddRouterFlags(CLI::App* app, RouterFlags* f) {
  app->add_option("--model", f->model, "checkpoint folder; only its text files are read")
      ->required();
  const auto option = [app](const char* name, auto& value, const char* help) {
    return app->add_option(name, value, help)->capture_default_str();
  };
  option("--model-name", f->front.model_name, "as clients name it (default: the folder's name)");
  option("--name", f->core.name, "of this router, in logs and to workers");
  option("--listen", f->listen, "gRPC address (clients, workers, health, reflection)");
  option("--http", f->http, "HTTP address (OpenAI endpoints, /healthz, /readyz, /metrics)");
  option("--digest", f->digest, "model digest workers must have (default: the first worker's)");
  const auto count = [&option](const char* name, auto& value, const char* unit, const char* help,
                               int64_t most = kCountMax) {
    option(name, value, help)->check(WholeIn(1, most, unit));
  };
  const auto seconds = [&option](const char* name, double& value, const char* help,
                                 double least = kSecondsMin) {
    option(name, value, help)->check(NumberIn(least, kSecondsMax, "seconds"));
  };
  count("--live-requests", f->core.live_requests_max, "requests",
        "requests admitted and not ended");
  app->add_option(
         "--waiting-requests", f->waiting_requests,
         absl::StrFormat("of these, waiting for room at a worker, for each tenant (cache salt) "
                         "(default: %d, or --live-requests where that is less)",
                         f->core.waiting_requests_max))
      ->check(WholeIn(1, kCountMax, "requests"));
  count("--waiting-tokens", f->core.waiting_tokens_max, "tokens",
        "that these may cost: uncached prompt and expected answer, for each tenant");
  count("--turn-tokens", f->core.turn_tokens, "tokens",
        "worth of requests that tenants place in turn");
  seconds("--ageing-seconds", f->ageing_seconds, "a request is passed by cheaper ones for at most");
  seconds("--waiting-seconds", f->waiting_seconds, "longest wait for room");
  seconds("--request-seconds", f->request_seconds, "longest life of a request");
  count("--handoff-attempts", f->core.handoff_attempts_max, "hand-offs",
        "hand-offs tried for one request", kAttemptsPerPlacement);
  option("--disaggregate", f->disaggregate,
         "whether prefill workers compute prompts: as planned for each request, always or never")
      ->check(CLI::IsMember({"planned", "always", "never"}));
  app->add_flag(
      "--shared-processors", f->core.shared_processors,
      "prefill and decode workers compute on the same processors, so a hand-off spares answers "
      "that stream no time");
  count("--prompt-tokens", f->core.prompt_tokens_max, "tokens", "of the longest prompt taken");
  count("--sessions", f->core.sessions_max, "sessions",
        "conversations whose tokens are remembered by name");
  count("--session-mib", f->session_mib, "MiB", "of the tokens of these (MiB: 2^20 bytes)");
  count("--session-calls", f->core.session_calls_max, "calls",
        "calls about sessions that may wait for workers at once, half of them of one tenant");
  option("--store-forget-minutes", f->store_forget_minutes,
         "minutes after which a worker with a store that does not come back counts as gone; until "
         "then sessions that it may have are unavailable, not absent")
      ->check(NumberIn(kStoreForgetMinutesMin, kStoreForgetMinutesMax, "minutes"));
  count("--decisions", f->core.decisions_max, "requests",
        "requests that `explain` can look back at");
  seconds("--heartbeat-seconds", f->heartbeat_seconds, "between two reports of a worker");
  seconds("--lease-seconds", f->lease_seconds, "a worker silent for this long is lost");
  count("--http-threads", f->http_options.threads, "threads", "threads of the HTTP port",
        kThreadsMax);
  count("--http-connections", f->http_options.connections_max, "connections",
        "open HTTP connections");
  count("--http-body-bytes", f->http_options.body_bytes_max, "bytes", "of the largest HTTP body");
  count("--encode-threads", f->encode.threads, "threads", "threads that tokenise large inputs",
        kThreadsMax);
  count("--encode-queue", f->encode.queue_max, "inputs",
        "large inputs that wait for these threads");
  app->add_option("--trace-endpoint", f->trace_endpoint,
                  "OpenTelemetry collector (OTLP over gRPC, host:port) that is sent a span of each "
                  "request whose client records its trace (default: none)");
  seconds("--drain-seconds", f->drain_seconds, "longest wait for running answers after SIGTERM", 0);
  app->add_option("--ports-file", f->ports_file, "write the chosen ports here (default: nowhere)");
  app->add_option("--parent", f->parent, "end when this process dies")->group("");
  option("--log-level", f->log_level, "debug, info, warning or error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
}

int RunRouter(RouterFlags flags) {
  const SignalWaiter signals;
  InitLog("router", ParseLogLevel(flags.log_level));
  if (flags.parent != 0) DieWithParent(static_cast<pid_t>(flags.parent));
  const absl::Status status = Run(std::move(flags), signals);
  if (status.ok()) return 0;
  LogError("router.failed", {{"error", status.ToString()}});
  return 1;
}

}  // namespace deltamesh
