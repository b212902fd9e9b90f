#include "services/common/grpc_server.h"

#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "runtime/base/status.h"

namespace deltamesh {

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const GrpcServerOptions& options, const std::vector<grpc::Service*>& services) {
  const size_t colon = options.listen.rfind(':');
  if (colon == std::string::npos) {
    return InvalidArgument("listen: \"%s\" has no port; use host:port, port 0 for any free one",
                           options.listen);
  }
  // Both are switches of the process for servers built later; setting them twice is harmless.
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  std::unique_ptr<GrpcServer> server(new GrpcServer());
  server->host_ = options.listen.substr(0, colon);
  server->health_names_ = options.health_names;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.message_bytes_max));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS,
                             absl::ToInt64Milliseconds(options.keepalive_time));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                             absl::ToInt64Milliseconds(options.keepalive_timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 500);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  // Two processes on one port would share its connections silently.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &server->port_);
  for (grpc::Service* service : services) builder.RegisterService(service);
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr || server->port_ == 0) {
    return Unavailable("gRPC: cannot listen on %s; is the port taken or the address not ours?",
                       options.listen);
  }
  server->SetServing(false);
  return server;
}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

std::string GrpcServer::address() const {
  const bool any = host_.empty() || host_ == "0.0.0.0" || host_ == "[::]";
  return absl::StrFormat("%s:%d", any ? "127.0.0.1" : host_, port_);
}

void GrpcServer::SetServing(bool serving) {
  if (server_ == nullptr) return;
  auto* health = server_->GetHealthCheckService();
  health->SetServingStatus("", serving);
  for (const auto& name : health_names_) health->SetServingStatus(name, serving);
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (server_ == nullptr) return;
  server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  server_->Wait();
  server_ = nullptr;
}

}  // namespace deltamesh
