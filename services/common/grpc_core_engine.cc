#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "runtime/base/status.h"
#include "services/common/grpc_core_call.h"
#include "services/common/grpc_engine.h"

namespace deltamesh {
namespace {

// From now, on the clock that nobody sets.
gpr_timespec After(absl::Duration wait) {
  if (wait <= absl::ZeroDuration()) return gpr_inf_past(GPR_CLOCK_MONOTONIC);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_micros(absl::ToInt64Microseconds(wait), GPR_TIMESPAN));
}

void SetArguments(const GrpcPortOptions& options, grpc::ServerBuilder* builder) {
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

// One thread polls: a second one would cost more than it brings, with each event gRPC would wake the other
// to wait in place of the first.
class CoreEngine final : public GrpcEngine {
 public:
  explicit CoreEngine(Take take) : take_(std::move(take)) {}
  ~CoreEngine() override { CHECK(server_ == nullptr, "a gRPC server was not shut down"); }

  absl::Status Start(const GrpcPortOptions& options) {
    // Others answer for health here: gRPC's own would bring threads that wait for connections too.
    grpc::EnableDefaultHealthCheckService(false);
    grpc::ServerBuilder builder;
    SetArguments(options, &builder);
    builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port_);
    builder.RegisterAsyncGenericService(&calls_);
    queue_ = builder.AddCompletionQueue();
    server_ = builder.BuildAndStart();
    if (server_ != nullptr && port_ != 0) {
      Accept();
      return absl::OkStatus();
    }
    if (server_ != nullptr) Shutdown(absl::ZeroDuration());
    return Unavailable("gRPC: cannot listen on %s; is the port taken or the address not ours?",
                       options.listen);
  }

  int port() const override { return port_; }

  bool Poll(absl::Duration wait) override {
    poller_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    void* tag = nullptr;
    bool ok = false;
    if (queue_->AsyncNext(&tag, &ok, After(wait)) != grpc::CompletionQueue::GOT_EVENT) return false;
    static_cast<GrpcTag*>(tag)->Run(ok);
    return true;
  }

  void Wake() override {
    if (poller_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
    if (wake_pending_.exchange(true)) return;
    absl::MutexLock lock(&mu_);
    if (!closed_) alarm_.Set(queue_.get(), gpr_inf_past(GPR_CLOCK_MONOTONIC), &wake_tag_);
  }

  void Shutdown(absl::Duration grace) override {
    std::thread thread([this] {
      void* tag = nullptr;
      for (bool ok = false; queue_->Next(&tag, &ok);) static_cast<GrpcTag*>(tag)->Run(ok);
    });
    server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
    {
      absl::MutexLock lock(&mu_);
      closed_ = true;
      for (const auto& call : live_) call->Close();
    }
    queue_->Shutdown();
    thread.join();
    server_ = nullptr;
    queue_ = nullptr;
  }

 private:
  using Call = std::shared_ptr<GrpcCoreCall>;
  class WakeTag final : public GrpcTag {
   public:
    explicit WakeTag(std::atomic<bool>* pending) : pending_(pending) {}
    void Run(bool) override { *pending_ = false; }

   private:
    std::atomic<bool>* const pending_;
  };

  static Call Share(GrpcCoreCall* call) {
    return std::static_pointer_cast<GrpcCoreCall>(call->shared_from_this());
  }

  // Waits for the next call.
  void Accept() {
    auto call = std::make_shared<GrpcCoreCall>();
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    call->Await(&calls_, queue_.get(), [this, at = call.get()](bool ok) {
      if (ok) OnArrived(Share(at));
    });
  }

  void OnArrived(const Call& call) {
    Accept();
    {
      absl::MutexLock lock(&mu_);
      live_.insert(call);
      if (closed_) call->Close();
    }
    call->Begin(take_(call), [this](GrpcCoreCall* done) {
      absl::MutexLock lock(&mu_);
      live_.erase(Share(done));
    });
  }

  const Take take_;
  int port_ = 0;
  grpc::AsyncGenericService calls_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
  std::atomic<std::thread::id> poller_;  // who called Poll

  std::atomic<bool> wake_pending_ = false;
  WakeTag wake_tag_{&wake_pending_};

  absl::Mutex mu_;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;             // the queue takes nothing more
  absl::flat_hash_set<Call> live_ ABSL_GUARDED_BY(mu_);  // arrived and not done
};

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcEngine>> StartGrpcCore(const GrpcPortOptions& options,
                                                          GrpcEngine::Take take) {
  auto engine = std::make_unique<CoreEngine>(std::move(take));
  RETURN_IF_ERROR(engine->Start(options));
  return engine;
}

}  // namespace deltamesh
