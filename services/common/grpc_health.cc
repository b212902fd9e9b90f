#include "services/common/grpc_health.h"

#include <algorithm>
#include <utility>

#include "health/v1/health.grpc.pb.h"

namespace deltamesh {
namespace {

namespace wire = grpc::health::v1;

// Of states that a watcher has not read yet; only the last one matters to it.
constexpr size_t kUnreadStatesMax = 64;

}  // namespace

// A call of Watch: the states of one name, until the client has seen enough.
class HealthService::Watcher final : public GrpcCall::Events {
 public:
  Watcher(HealthService* service, const std::shared_ptr<GrpcCall>& call)
      : service_(service), call_(call) {
    call_->Read();
  }
  void OnMessage(const grpc::ByteBuffer& bytes) override { service_->Watch(call_, bytes); }
  void OnMessagesEnd() override {
    call_->Finish({grpc::StatusCode::INVALID_ARGUMENT, "request: is missing"});
  }
  void OnDone() override { service_->Forget(call_.get()); }

 private:
  HealthService* const service_;
  const std::shared_ptr<GrpcCall> call_;
};

HealthService::HealthService(const std::vector<std::string>& names) : names_(names) {}
HealthService::~HealthService() = default;

std::string_view HealthService::name() const { return wire::Health::service_full_name(); }

std::shared_ptr<GrpcCall::Events> HealthService::Take(std::string_view method,
                                                      const std::shared_ptr<GrpcCall>& call) {
  if (method == "Watch") return std::make_shared<Watcher>(this, call);
  if (method != "Check") return nullptr;
  return std::make_shared<OneRequest>(
      call, [this, call](const grpc::ByteBuffer& bytes) { Check(call, bytes); });
}

int HealthService::StatusOf(const std::string& name) const {
  if (!name.empty() && std::find(names_.begin(), names_.end(), name) == names_.end()) {
    return wire::HealthCheckResponse::SERVICE_UNKNOWN;
  }
  return serving_ ? wire::HealthCheckResponse::SERVING : wire::HealthCheckResponse::NOT_SERVING;
}

namespace {

wire::HealthCheckResponse Response(int status) {
  wire::HealthCheckResponse response;
  response.set_status(static_cast<wire::HealthCheckResponse::ServingStatus>(status));
  return response;
}

}  // namespace

void HealthService::Check(const std::shared_ptr<GrpcCall>& call, const grpc::ByteBuffer& bytes) {
  wire::HealthCheckRequest request;
  if (bytes.Length() > kSmallRequestBytes || !ParseBytes(bytes, &request)) {
    return call->Finish({grpc::StatusCode::INVALID_ARGUMENT, "request: is no health check"});
  }
  int status = 0;
  {
    absl::MutexLock lock(&mu_);
    status = StatusOf(request.service());
  }
  if (status == wire::HealthCheckResponse::SERVICE_UNKNOWN) {
    return call->Finish({grpc::StatusCode::NOT_FOUND, "service: is not known here"});
  }
  call->Reply(Response(status));
}

void HealthService::Watch(const std::shared_ptr<GrpcCall>& call, const grpc::ByteBuffer& bytes) {
  wire::HealthCheckRequest request;
  if (bytes.Length() > kSmallRequestBytes || !ParseBytes(bytes, &request)) {
    return call->Finish({grpc::StatusCode::INVALID_ARGUMENT, "request: is no health check"});
  }
  absl::MutexLock lock(&mu_);
  if (stopped_) return call->Finish({grpc::StatusCode::CANCELLED, "the server is stopping"});
  watchers_[call.get()] = {call, request.service()};
  call->Write(Response(StatusOf(request.service())), kUnreadStatesMax);
}

void HealthService::Forget(GrpcCall* call) {
  absl::MutexLock lock(&mu_);
  watchers_.erase(call);
}

void HealthService::SetServing(bool serving) {
  absl::MutexLock lock(&mu_);
  if (std::exchange(serving_, serving) == serving) return;
  for (const auto& [at, watched] : watchers_) {
    const int status = StatusOf(watched.name);
    if (status == wire::HealthCheckResponse::SERVICE_UNKNOWN) continue;
    if (watched.call->Write(Response(status), kUnreadStatesMax) == GrpcCall::Written::kFull) {
      watched.call->Abort({grpc::StatusCode::RESOURCE_EXHAUSTED, "states are left unread"});
    }
  }
}

void HealthService::Stop() {
  absl::MutexLock lock(&mu_);
  stopped_ = true;
  for (const auto& [at, watched] : watchers_) {
    watched.call->Finish({grpc::StatusCode::CANCELLED, "the server is stopping"});
  }
}

}  // namespace deltamesh
