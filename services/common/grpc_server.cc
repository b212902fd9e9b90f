#include "services/common/grpc_server.h"

#include <utility>

#include "runtime/base/status.h"
#include "services/common/grpc_health.h"
#include "services/common/grpc_reflection.h"

namespace deltamesh {

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

  const auto take = [at = server.get()](const std::shared_ptr<GrpcCall>& call) {
    return at->AnswererOf(call);
  };
  ASSIGN_OR_RETURN(server->engine_, options.engine(options, take));
  server->port_ = server->engine_->port();
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

void GrpcServer::Loop() {
  while (!stopping_) engine_->Poll(absl::Seconds(60));
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (engine_ == nullptr || stopping_.exchange(true)) return;
  health_->Stop();
  if (thread_.joinable()) {
    engine_->Wake();
    thread_.join();
  }
  engine_->Shutdown(grace);
}

}  // namespace deltamesh
