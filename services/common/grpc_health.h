// grpc.health.v1.Health for the names of one server.
//
// Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "services/common/grpc_call.h"

namespace deltamesh {

class HealthService final : public GrpcService {
 public:
  // All of one state; "" is among them. NOT_SERVING at first.
  explicit HealthService(const std::vector<std::string>& names);
  ~HealthService() override;

  std::string_view name() const override;
  std::shared_ptr<GrpcCall::Events> Take(std::string_view method,
                                         const std::shared_ptr<GrpcCall>& call) override;

  void SetServing(bool serving);
  // Ends all watching.
  void Stop();

 private:
  class Watcher;

  // As an enum of the response.
  int StatusOf(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Check(const std::shared_ptr<GrpcCall>& call, const grpc::ByteBuffer& bytes);
  void Watch(const std::shared_ptr<GrpcCall>& call, const grpc::ByteBuffer& bytes);
  void Forget(GrpcCall* call);

  const std::vector<std::string> names_;
  absl::Mutex mu_;
  bool serving_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  struct Watched {
    std::shared_ptr<GrpcCall> call;
    std::string name;
  };
  absl::flat_hash_map<GrpcCall*, Watched> watchers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace deltamesh
