#include "services/common/grpc_server.h"

#include <utility>

#include "runtime/base/status.h"
#include "services/common/grpc_health.h"
#include "services/common/grpc_reflection.h"

namespace deltamesh {
namespace {

// From now, on the clock that nobody sets.
gpr_timespec After(absl::Duration wait) {
  if (wait <= absl::ZeroDuration()) return gpr_inf_past(GPR_CLOCK_MONOTONIC);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_micros(absl::ToInt64Microseconds(wait), GPR_TIMESPAN));
}

void SetArguments(const GrpcServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(options.message_bytes_max));
  const auto set = [builder](const char* name, int64_t value) {
    builder->AddChannelArgument(name, static_cast<int>(value));
  };
  set(GRPC_ARG_KEEPALIVE_TIME_MS, absl::ToInt64Milliseconds(options.keepalive_time));
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, absl::ToInt64Milliseconds(options.keepalive_timeout));
  set(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  set(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 500);
  set(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  // Two processes on one port would share its connections silently.
  set(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

}  // namespace

GrpcServer::GrpcServer() = default;

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const GrpcServerOptions& options, const std::vector<GrpcService*>& services) {
  const size_t colon = options.listen.rfind(':');
  if (colon == std::string::npos) {
    return InvalidArgument("listen: \"%s\" has no port; use host:port, port 0 for any free one",
                           options.listen);
  }
  std::unique_ptr<GrpcServer> server(new GrpcServer());
  server->host_ = options.listen.substr(0, colon);
  server->health_ = std::make_unique<HealthService>(options.health_names);
  std::vector<std::string> names;
  const auto add = [&](GrpcService* service) {
    names.emplace_back(service->name());
    CHECK(server->services_.emplace(service->name(), service).second, "a service twice");
  };
  for (GrpcService* service : services) add(service);
  add(server->health_.get());
  server->reflection_ = MakeReflectionService(&names);
  add(server->reflection_.get());

  // Ours, above: gRPC's own would bring threads that wait for connections too.
  grpc::EnableDefaultHealthCheckService(false);
  grpc::ServerBuilder builder;
  SetArguments(options, &builder);
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &server->port_);
  builder.RegisterAsyncGenericService(&server->calls_);
  server->queue_ = builder.AddCompletionQueue();
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr || server->port_ == 0) {
    return Unavailable("gRPC: cannot listen on %s; is the port taken or the address not ours?",
                       options.listen);
  }
  server->Accept();
  if (options.own_thread) {
    server->thread_ = std::thread([at = server.get()] { at->Loop(); });
  }
  return server;
}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

std::string GrpcServer::address() const {
  const bool any = host_.empty() || host_ == "0.0.0.0" || host_ == "[::]";
  return absl::StrFormat("%s:%d", any ? "127.0.0.1" : host_, port_);
}

void GrpcServer::SetServing(bool serving) { health_->SetServing(serving); }

void GrpcServer::Accept() {
  auto call = std::make_shared<GrpcCall>();
  absl::MutexLock lock(&mu_);
  if (closed_) return;
  call->Await(&calls_, queue_.get(), [this, at = call.get()](bool ok) {
    if (ok) OnArrived(at->shared_from_this());
  });
}

void GrpcServer::OnArrived(const std::shared_ptr<GrpcCall>& call) {
  Accept();
  {
    absl::MutexLock lock(&mu_);
    live_.insert(call);
    if (closed_) call->Close();
  }
  call->Begin(AnswererOf(call), [this](GrpcCall* done) { OnDone(done); });
}

std::shared_ptr<GrpcCall::Events> GrpcServer::AnswererOf(const std::shared_ptr<GrpcCall>& call) {
  std::string_view path = call->method();
  const size_t slash = path.rfind('/');
  if (path.starts_with('/') && slash > 0) {
    const auto found = services_.find(path.substr(1, slash - 1));
    if (found != services_.end()) {
      if (auto events = found->second->Take(path.substr(slash + 1), call)) return events;
    }
  }
  call->Finish({grpc::StatusCode::UNIMPLEMENTED, "there is no such method"});
  return nullptr;
}

void GrpcServer::OnDone(GrpcCall* call) {
  absl::MutexLock lock(&mu_);
  live_.erase(call->shared_from_this());
}

bool GrpcServer::Poll(absl::Duration wait) {
  poller_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  void* tag = nullptr;
  bool ok = false;
  if (queue_->AsyncNext(&tag, &ok, After(wait)) != grpc::CompletionQueue::GOT_EVENT) return false;
  static_cast<GrpcTag*>(tag)->Run(ok);
  return true;
}

void GrpcServer::Wake() {
  if (poller_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
  if (wake_pending_.exchange(true)) return;
  absl::MutexLock lock(&mu_);
  if (!closed_) alarm_.Set(queue_.get(), gpr_inf_past(GPR_CLOCK_MONOTONIC), &wake_tag_);
}

void GrpcServer::Loop() {
  void* tag = nullptr;
  for (bool ok = false; queue_->Next(&tag, &ok);) static_cast<GrpcTag*>(tag)->Run(ok);
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (server_ == nullptr) return;
  health_->Stop();
  // Who lent itself has stopped.
  if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
    for (const auto& call : live_) call->Close();
  }
  queue_->Shutdown();
  thread_.join();
  server_ = nullptr;
  queue_ = nullptr;
}

}  // namespace deltamesh
