// A gRPC server with what every port of the mesh has: health service, reflection, keepalive, size limits.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc

namespace deltamesh {

struct GrpcServerOptions {
  std::string listen = "127.0.0.1:0";    // host:port; port 0 lets the system choose
  int64_t message_bytes_max = 64 << 20;  // larger messages are refused with RESOURCE_EXHAUSTED
  absl::Duration keepalive_time = absl::Seconds(10);
  absl::Duration keepalive_timeout = absl::Seconds(10);
  std::vector<std::string> health_names;  // services named in health checks besides ""
};

class GrpcServer {
 public:
  // Starts NOT_SERVING. `services` must outlive the server. UNAVAILABLE names the address when it cannot
  // be bound.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const GrpcServerOptions& options, const std::vector<grpc::Service*>& services);
  ~GrpcServer();  // Shutdown with no grace

  int port() const { return port_; }
  std::string address() const;  // host:port as others can dial it

  // What the health service answers for "" and every health name.
  void SetServing(bool serving);

  // Refuses new calls, lets running ones end for up to `grace`, then cancels them. Idempotent.
  void Shutdown(absl::Duration grace);

 private:
  GrpcServer() = default;
  std::string host_;
  int port_ = 0;
  std::vector<std::string> health_names_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace deltamesh
