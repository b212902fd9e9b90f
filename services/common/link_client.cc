#include "services/common/link_client.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "runtime/base/log.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "services/common/link_table.h"

namespace deltamesh {
namespace {

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target, const LinkOptions& options) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(static_cast<int>(options.message_bytes_max));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, absl::ToInt64Milliseconds(options.keepalive_time));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, absl::ToInt64Milliseconds(options.keepalive_timeout));
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS,
              absl::ToInt64Milliseconds(options.backoff_min));
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, absl::ToInt64Milliseconds(options.backoff_min));
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, absl::ToInt64Milliseconds(options.backoff_max));
  // Without a pool of its own two links to one router would share a connection and its fate.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), args);
}

// The channels of a process share a queue and its threads, which end with the last channel; in gRPC 1.51 a
// thread may touch the queue after its end. So one channel stays to the end of the process, bound to the
// queue by a call that fails before it dials.
void KeepQueue() {
  struct Kept {
    std::shared_ptr<grpc::Channel> channel =
        grpc::CreateChannel("unix:/", grpc::InsecureChannelCredentials());
    grpc::GenericStub stub{channel};
    grpc::ClientContext context;
    grpc::Slice nothing;
    grpc::ByteBuffer request{&nothing, 1}, response;
  };
  static Kept* const kept = [] {
    auto* k = new Kept;
    k->context.set_deadline(std::chrono::system_clock::time_point::min());
    k->stub.UnaryCall(&k->context, "/none/None", grpc::StubOptions(), &k->request, &k->response,
                      [](const grpc::Status&) {});
    return k;
  }();
  (void)kept;
}

}  // namespace

struct LinkClient::Shared {
  LinkOptions options;
  LinkClientEvents events;
  LinkTable<Stream> streams;
};

// One stream. A hold keeps the reactor alive for writes from other threads; it is given back exactly once,
// when reading ended and no write is in flight. Calls into gRPC happen outside the lock: they may run
// reactions before they return.
class LinkClient::Stream final
    : public grpc::ClientBidiReactor<mesh::WorkerMessage, mesh::RouterMessage> {
 public:
  Stream(std::shared_ptr<Shared> shared, LinkId id, std::string target)
      : shared_(std::move(shared)), id_(id), target_(std::move(target)) {}

  void Begin(mesh::Mesh::Stub* stub) {
    stub->async()->Link(&context_, this);
    AddHold();
    StartRead(&incoming_);
    StartCall();
  }

  void Cancel() { context_.TryCancel(); }

  // Takes no more messages. After the queued ones the router hears that nothing follows, and ends the
  // stream when it has read them all: a cancellation would overtake those that it has not.
  void Finish() {
    bool opened = false;
    {
      absl::MutexLock lock(&mu_);
      finishing_ = true;
      opened = opened_;
    }
    // Nothing can have been sent on a stream that nobody heard of.
    if (opened) {
      Pump();
    } else {
      Cancel();
    }
  }

  bool Send(mesh::WorkerMessage message) {
    {
      absl::MutexLock lock(&mu_);
      if (ended_ || finishing_) return false;
      if (static_cast<int64_t>(queue_.size()) >= shared_->options.queue_max) {
        overflow_ = true;
      } else {
        queue_.push_back(std::move(message));
      }
    }
    if (overflow_) {
      Cancel();
      return false;
    }
    Pump();
    return true;
  }

  // Waits until OnDone ran; how it ended when the router had never accepted it, else nothing.
  std::optional<absl::Status> AwaitDone() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&done_));
    if (opened_) return std::nullopt;
    return status_;
  }

  // False when OnDone has not run by then.
  bool AwaitDoneUntil(absl::Time until) {
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithDeadline(absl::Condition(&done_), until);
  }

  void OnReadInitialMetadataDone(bool ok) override {
    if (!ok) return;
    {
      absl::MutexLock lock(&mu_);
      opened_ = true;
    }
    shared_->events.opened(id_, target_);
  }

  void OnReadDone(bool ok) override {
    if (ok && shared_->events.message(id_, std::exchange(incoming_, {}))) {
      StartRead(&incoming_);
      return;
    }
    if (ok) Cancel();
    End();
  }

  void OnWriteDone(bool ok) override {
    bool release = false;
    {
      absl::MutexLock lock(&mu_);
      writing_ = false;
      release = std::exchange(release_after_write_, false);
    }
    if (release) {
      RemoveHold();
    } else if (ok) {
      Pump();
    }
  }

  // The end of writing is the last write.
  void OnWritesDoneDone(bool ok) override { OnWriteDone(ok); }

  void OnDone(const grpc::Status& status) override {
    bool opened = false;
    {
      absl::MutexLock lock(&mu_);
      opened = opened_;
    }
    const std::shared_ptr<Stream> self = shared_->streams.Take(id_);
    if (opened) {
      absl::Status reason(static_cast<absl::StatusCode>(status.error_code()),
                          status.error_message());
      if (overflow_) reason = ResourceExhausted("link: the write queue to %s was full", target_);
      if (reason.ok()) reason = Unavailable("link: %s ended the stream", target_);
      shared_->events.closed(id_, std::move(reason));
    }
    absl::MutexLock lock(&mu_);
    status_ =
        absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    done_ = true;
  }

 private:
  // No more reads: stop writing and give the hold back.
  void End() {
    {
      absl::MutexLock lock(&mu_);
      ended_ = true;
      queue_.clear();
      if (writing_) {
        release_after_write_ = true;
        return;
      }
    }
    RemoveHold();
  }

  void Pump() {
    bool last = false;
    {
      absl::MutexLock lock(&mu_);
      if (writing_ || ended_) return;
      last = queue_.empty();
      if (last && (!finishing_ || std::exchange(half_closed_, true))) return;
      if (!last) {
        outgoing_ = std::move(queue_.front());
        queue_.pop_front();
      }
      writing_ = true;
    }
    if (last) {
      StartWritesDone();
    } else {
      StartWrite(&outgoing_);
    }
  }

  const std::shared_ptr<Shared> shared_;
  const LinkId id_;
  const std::string target_;
  grpc::ClientContext context_;
  mesh::RouterMessage incoming_;  // of the read in flight
  mesh::WorkerMessage outgoing_;  // of the write in flight
  std::atomic<bool> overflow_ = false;
  absl::Mutex mu_;
  std::deque<mesh::WorkerMessage> queue_ ABSL_GUARDED_BY(mu_);
  bool opened_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool finishing_ ABSL_GUARDED_BY(mu_) = false;    // nothing more is queued
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;  // the end of writing was asked for
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool release_after_write_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

// Keeps one stream to one target; a thread that mostly sleeps.
class LinkClient::Dialer {
 public:
  Dialer(std::shared_ptr<Shared> shared, std::string target)
      : shared_(std::move(shared)), target_(std::move(target)) {}

  ~Dialer() { Stop(absl::InfinitePast()); }

  void Start() {
    thread_ = std::thread([this] { Run(); });
  }

  // Lets the stream finish; none follows.
  void RequestStop() {
    {
      absl::MutexLock lock(&mu_);
      stop_ = true;
    }
    const std::shared_ptr<Stream> stream = Current();
    if (stream != nullptr) stream->Finish();
  }

  // Cancels a stream that has not finished by then, and waits until it is gone.
  void Stop(absl::Time until) {
    RequestStop();
    const std::shared_ptr<Stream> stream = Current();
    if (stream != nullptr && !stream->AwaitDoneUntil(until)) stream->Cancel();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    auto stub = mesh::Mesh::NewStub(MakeChannel(target_, shared_->options));
    const LinkOptions& o = shared_->options;
    absl::Duration pause = o.backoff_min;
    bool told = false;
    for (;;) {
      auto stream = NewStream();
      if (stream == nullptr) return;
      const absl::Time began = absl::Now();
      stream->Begin(stub.get());
      const std::optional<absl::Status> failed = stream->AwaitDone();
      // One that the router soon ends, as that of a worker it refuses, would else come ten times a second.
      if (!failed && absl::Now() - began >= o.lasting_min) pause = o.backoff_min;
      absl::MutexLock lock(&mu_);
      if (failed && !told && !stop_) {
        LogWarning(
            "link.unreachable",
            {{"router", target_}, {"reason", SafeMessage(*failed)}, {"retry", "until it answers"}});
      }
      told = failed.has_value();
      stream_ = nullptr;
      if (mu_.AwaitWithTimeout(absl::Condition(&stop_), pause)) return;
      pause = std::min(pause * 2, o.backoff_max);
    }
  }

  // Null between two streams, and for good when the last one is gone.
  std::shared_ptr<Stream> Current() {
    absl::MutexLock lock(&mu_);
    return stream_;
  }

  std::shared_ptr<Stream> NewStream() {
    absl::MutexLock lock(&mu_);
    if (stop_) return nullptr;
    stream_ = shared_->streams.Add(
        [this](LinkId id) { return std::make_shared<Stream>(shared_, id, target_); });
    return stream_;
  }

  const std::shared_ptr<Shared> shared_;
  const std::string target_;
  std::thread thread_;
  absl::Mutex mu_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<Stream> stream_ ABSL_GUARDED_BY(mu_);
};

LinkClient::LinkClient(std::vector<std::string> targets, const LinkOptions& options,
                       LinkClientEvents events)
    : shared_(std::make_shared<Shared>()) {
  KeepQueue();
  shared_->options = options;
  shared_->events = std::move(events);
  for (auto& target : targets) dialers_.push_back(std::make_unique<Dialer>(shared_, target));
}

LinkClient::~LinkClient() { Stop(); }

void LinkClient::Start() {
  for (auto& dialer : dialers_) dialer->Start();
}

void LinkClient::Stop(absl::Duration flush_max) {
  const absl::Time until = absl::Now() + flush_max;
  for (auto& dialer : dialers_) dialer->RequestStop();
  for (auto& dialer : dialers_) dialer->Stop(until);
}

bool LinkClient::Send(LinkId link, mesh::WorkerMessage message) {
  auto stream = shared_->streams.Find(link);
  return stream != nullptr && stream->Send(std::move(message));
}

void LinkClient::Reset(LinkId link) {
  if (auto stream = shared_->streams.Find(link)) stream->Cancel();
}

}  // namespace deltamesh
