#include "services/common/link_server.h"

#include <utility>

#include "deltamesh/mesh/mesh.grpc.pb.h"
#include "runtime/base/status.h"
#include "services/common/link_table.h"

namespace deltamesh {

struct LinkServer::Shared {
  LinkOptions options;
  LinkServerEvents events;
  LinkTable<Stream> streams;
};

class LinkServer::Stream final : public GrpcCall::Events {
 public:
  Stream(std::shared_ptr<Shared> shared, LinkId id, std::shared_ptr<GrpcCall> call)
      : shared_(std::move(shared)), id_(id), call_(std::move(call)) {}

  // Separate from the constructor because reactions look the stream up.
  void Begin() {
    shared_->events.opened(id_, call_->peer());
    call_->Open();
    call_->Read();
  }

  bool Send(const mesh::RouterMessage& message) {
    const auto most = static_cast<size_t>(shared_->options.queue_max);
    const GrpcCall::Written written = call_->Write(message, most);
    if (written == GrpcCall::Written::kFull) {
      Close(ResourceExhausted("link: %d messages wait to be written; the reader does not keep up",
                              most),
            /*drop=*/true);
    }
    return written == GrpcCall::Written::kQueued;
  }

  void Close(const absl::Status& status, bool drop) {
    {
      absl::MutexLock lock(&mu_);
      if (closing_) return;
      closing_ = true;
      reason_ = status;
    }
    const grpc::Status end(static_cast<grpc::StatusCode>(status.code()), MessageOf(status));
    if (drop) {
      call_->Abort(end);
    } else {
      call_->Finish(end);
    }
  }

  void OnMessage(const grpc::ByteBuffer& bytes) override {
    {
      absl::MutexLock lock(&mu_);
      if (closing_) return;  // it hears nothing any more, so it must not look alive
    }
    mesh::WorkerMessage message;
    if (!ParseBytes(bytes, &message)) {
      return Close(
          InvalidArgument("link: a message of %d bytes is none of this protocol", bytes.Length()),
          /*drop=*/true);
    }
    if (!shared_->events.message(id_, std::move(message))) {
      return Close(ResourceExhausted("link: the inbox is full; dial again later"), /*drop=*/true);
    }
    call_->Read();
  }

  void OnMessagesEnd() override {
    Close(Cancelled("link: the worker ended the stream"), /*drop=*/true);
  }
  void OnCancelled() override { Close(Cancelled("link: the worker went away"), /*drop=*/true); }

  void OnDone() override {
    const std::shared_ptr<Stream> self = shared_->streams.Take(id_);
    absl::Status reason = Unavailable("link: the worker is gone");
    {
      absl::MutexLock lock(&mu_);
      if (std::exchange(closing_, true)) reason = reason_;
    }
    shared_->events.closed(id_, std::move(reason));
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const LinkId id_;
  const std::shared_ptr<GrpcCall> call_;
  absl::Mutex mu_;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status reason_ ABSL_GUARDED_BY(mu_);
};

class LinkServer::Service final : public GrpcService {
 public:
  explicit Service(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  std::string_view name() const override { return mesh::Mesh::service_full_name(); }

  std::shared_ptr<GrpcCall::Events> Take(std::string_view method,
                                         const std::shared_ptr<GrpcCall>& call) override {
    if (method != "Link") return nullptr;
    const std::shared_ptr<Stream> stream = shared_->streams.Add(
        [&](LinkId id) { return std::make_shared<Stream>(shared_, id, call); });
    stream->Begin();
    return stream;
  }

 private:
  const std::shared_ptr<Shared> shared_;
};

LinkServer::LinkServer(const LinkOptions& options, LinkServerEvents events)
    : shared_(std::make_shared<Shared>()) {
  shared_->options = options;
  shared_->events = std::move(events);
  service_ = std::make_unique<Service>(shared_);
}

LinkServer::~LinkServer() = default;

GrpcService* LinkServer::service() { return service_.get(); }

bool LinkServer::Send(LinkId link, const mesh::RouterMessage& message) {
  auto stream = shared_->streams.Find(link);
  return stream != nullptr && stream->Send(message);
}

void LinkServer::Close(LinkId link, const absl::Status& status) {
  if (auto stream = shared_->streams.Find(link)) stream->Close(status, /*drop=*/false);
}

void LinkServer::CloseAll(const absl::Status& status) {
  for (auto& stream : shared_->streams.All()) stream->Close(status, /*drop=*/false);
}

}  // namespace deltamesh
