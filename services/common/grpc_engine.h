// What speaks gRPC at a port: accepts connections and calls, moves messages, keeps HTTP/2's rules. Who
// answers the calls is not its business.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "services/common/grpc_call.h"

namespace deltamesh {

struct GrpcPortOptions {
  std::string listen = "127.0.0.1:0";    // host:port; port 0 lets the system choose
  int64_t message_bytes_max = 64 << 20;  // larger messages are refused with RESOURCE_EXHAUSTED
  absl::Duration keepalive_time = absl::Seconds(10);
  absl::Duration keepalive_timeout = absl::Seconds(10);
};

class GrpcEngine {
 public:
  // Who answers a call that arrived; null when the call has been told its end. On the polling thread.
  using Take =
      std::function<std::shared_ptr<GrpcCall::Events>(const std::shared_ptr<GrpcCall>& call)>;

  virtual ~GrpcEngine() = default;
  virtual int port() const = 0;
  // Waits up to `wait` for something to happen and deals with what did; whether anything did. Always by the
  // same thread, and not once Shutdown was called.
  virtual bool Poll(absl::Duration wait) = 0;
  // From any thread: ends the Poll in progress, or else the next.
  virtual void Wake() = 0;
  // Refuses new calls, lets running ones end for up to `grace`, then cancels them. Once; nobody polls any
  // more. Afterwards calls may be asked for anything by whoever still has them: nothing happens.
  virtual void Shutdown(absl::Duration grace) = 0;
};

// UNAVAILABLE names the address when it cannot be bound.
using StartGrpcEngine = absl::StatusOr<std::unique_ptr<GrpcEngine>> (*)(const GrpcPortOptions&,
                                                                        GrpcEngine::Take);
// gRPC's own library.
absl::StatusOr<std::unique_ptr<GrpcEngine>> StartGrpcCore(const GrpcPortOptions& options,
                                                          GrpcEngine::Take take);
// nghttp2 and system calls: half the work or less for each message of a stream. Takes no compressed
// messages. Null where the build has no nghttp2.
StartGrpcEngine GrpcOverHttp2();
// The same, gRPC's own library in place of null.
inline StartGrpcEngine LeastGrpc() {
  const StartGrpcEngine lean = GrpcOverHttp2();
  return lean != nullptr ? lean : &StartGrpcCore;
}

}  // namespace deltamesh
