// A gRPC server with what every port of the mesh has: health service, reflection, keepalive, size limits.
//
// One thread waits for all connections and calls: the server's own, or one that has other work too and
// lends itself (`own_thread` false). A second one would cost more than it brings: with each event gRPC
// would wake the other to wait in place of the first.
//
// Thread-safe.
#pragma once

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "services/common/grpc_call.h"

namespace deltamesh {

class HealthService;

struct GrpcServerOptions {
  std::string listen = "127.0.0.1:0";    // host:port; port 0 lets the system choose
  int64_t message_bytes_max = 64 << 20;  // larger messages are refused with RESOURCE_EXHAUSTED
  absl::Duration keepalive_time = absl::Seconds(10);
  absl::Duration keepalive_timeout = absl::Seconds(10);
  std::vector<std::string> health_names;  // services named in health checks besides ""
  bool own_thread = true;                 // false: the owner calls Poll
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

  // Without a thread of its own. Waits up to `wait` for something to happen and deals with one thing that
  // did, if anything; always by the same thread, and not once Shutdown was called.
  bool Poll(absl::Duration wait);
  // From any thread: ends the Poll in progress, or else the next.
  void Wake();

  // Refuses new calls, lets running ones end for up to `grace`, then cancels them. Idempotent.
  void Shutdown(absl::Duration grace);

 private:
  class WakeTag final : public GrpcTag {
   public:
    explicit WakeTag(std::atomic<bool>* pending) : pending_(pending) {}
    void Run(bool) override { *pending_ = false; }

   private:
    std::atomic<bool>* const pending_;
  };

  GrpcServer();
  // Waits for the next call.
  void Accept();
  void OnArrived(const std::shared_ptr<GrpcCall>& call);
  std::shared_ptr<GrpcCall::Events> AnswererOf(const std::shared_ptr<GrpcCall>& call);
  void OnDone(GrpcCall* call);
  void Loop();

  std::string host_;
  int port_ = 0;
  std::map<std::string, GrpcService*, std::less<>> services_;
  std::unique_ptr<HealthService> health_;
  std::unique_ptr<GrpcService> reflection_;

  grpc::AsyncGenericService calls_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
  std::thread thread_;
  std::atomic<std::thread::id> poller_;  // who called Poll

  std::atomic<bool> wake_pending_ = false;
  WakeTag wake_tag_{&wake_pending_};

  absl::Mutex mu_;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;  // the queue takes nothing more
  absl::flat_hash_set<std::shared_ptr<GrpcCall>> live_
      ABSL_GUARDED_BY(mu_);  // arrived and not done
};

}  // namespace deltamesh
