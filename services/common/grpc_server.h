// A gRPC server with what every port of the mesh has: health service, reflection, keepalive, size limits.
//
// One thread waits for all connections and calls: the server's own, or one that has other work too and
// lends itself (`own_thread` false).
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "services/common/grpc_call.h"
#include "services/common/grpc_engine.h"

namespace deltamesh {

class HealthService;

struct GrpcServerOptions : GrpcPortOptions {
  std::vector<std::string> health_names;    // services named in health checks besides ""
  bool own_thread = true;                   // false: the owner calls Poll
  StartGrpcEngine engine = &StartGrpcCore;  // never null
};

class GrpcServer {
 public:
  // Starts NOT_SERVING. `services` must outlive the server. UNAVAILABLE names the address when it cannot
  // be bound.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const GrpcServerOptions& options, const std::vector<GrpcService*>& services);
  ~GrpcServer();  // Shutdown with no grace

  int port() const { return port_; }
  std::string address() const;  // host:port as others can dial it

  // What the health service answers for "" and every health name.
  void SetServing(bool serving);

  // Without a thread of its own; see GrpcEngine.
  bool Poll(absl::Duration wait) { return engine_->Poll(wait); }
  void Wake() { engine_->Wake(); }

  // Refuses new calls, lets running ones end for up to `grace`, then cancels them. Idempotent.
  void Shutdown(absl::Duration grace);

 private:
  GrpcServer();
  std::shared_ptr<GrpcCall::Events> AnswererOf(const std::shared_ptr<GrpcCall>& call);
  void Loop();

  std::string host_;
  int port_ = 0;
  std::map<std::string, GrpcService*, std::less<>> services_;
  std::unique_ptr<HealthService> health_;
  std::unique_ptr<GrpcService> reflection_;
  std::unique_ptr<GrpcEngine> engine_;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace deltamesh
