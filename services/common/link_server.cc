#include "services/common/link_server.h"

#include <deque>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "runtime/base/status.h"
#include "services/common/link_table.h"

namespace deltamesh {

struct LinkServer::Shared {
  LinkOptions options;
  LinkServerEvents events;
  LinkTable<Stream> streams;
};

// One stream. gRPC allows one write at a time and no Finish beside it; `writing_` and `finished_` keep
// that rule. Calls into gRPC happen outside the lock: they may run reactions before they return.
class LinkServer::Stream final
    : public grpc::ServerBidiReactor<mesh::WorkerMessage, mesh::RouterMessage> {
 public:
  Stream(std::shared_ptr<Shared> shared, LinkId id) : shared_(std::move(shared)), id_(id) {}

  // Separate from the constructor because reactions look the stream up.
  void Begin(const std::string& peer) {
    shared_->events.opened(id_, peer);
    {
      absl::MutexLock lock(&mu_);
      writing_ = true;
    }
    StartSendInitialMetadata();
    StartRead(&incoming_);
  }

  bool Send(mesh::RouterMessage message) {
    bool full = false;
    {
      absl::MutexLock lock(&mu_);
      if (closing_) return false;
      full = static_cast<int64_t>(queue_.size()) >= shared_->options.queue_max;
      if (!full) queue_.push_back(std::move(message));
    }
    if (full) {
      Close(ResourceExhausted("link: %d messages wait to be written; the reader does not keep up",
                              shared_->options.queue_max),
            /*drop=*/true);
      return false;
    }
    Pump();
    return true;
  }

  void Close(const absl::Status& status, bool drop) {
    {
      absl::MutexLock lock(&mu_);
      if (closing_) return;
      closing_ = true;
      close_status_ = status;
      if (drop) queue_.clear();
    }
    Pump();
  }

  void OnSendInitialMetadataDone(bool ok) override { WriteDone(ok); }
  void OnWriteDone(bool ok) override { WriteDone(ok); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Close(Cancelled("link: the worker ended the stream"), /*drop=*/true);
      return;
    }
    if (!shared_->events.message(id_, std::exchange(incoming_, {}))) {
      Close(ResourceExhausted("link: the inbox is full; dial again later"), /*drop=*/true);
      return;
    }
    StartRead(&incoming_);
  }

  void OnCancel() override { Close(Cancelled("link: the worker went away"), /*drop=*/true); }

  void OnDone() override {
    const std::shared_ptr<Stream> self = shared_->streams.Take(id_);
    absl::Status reason;
    {
      absl::MutexLock lock(&mu_);
      closing_ = true;
      reason = close_status_;
    }
    shared_->events.closed(id_, std::move(reason));
  }

 private:
  void WriteDone(bool ok) {
    {
      absl::MutexLock lock(&mu_);
      writing_ = false;
      if (!ok) {
        if (!closing_) close_status_ = Unavailable("link: a write failed; the worker is gone");
        closing_ = true;
        queue_.clear();
      }
    }
    Pump();
  }

  // Starts the next write, or the end when all is written.
  void Pump() {
    bool finish = false;
    grpc::Status end;
    {
      absl::MutexLock lock(&mu_);
      if (writing_ || finished_) return;
      if (!queue_.empty()) {
        outgoing_ = std::move(queue_.front());
        queue_.pop_front();
        writing_ = true;
      } else if (closing_) {
        finished_ = finish = true;
        end = grpc::Status(static_cast<grpc::StatusCode>(close_status_.code()),
                           MessageOf(close_status_));
      } else {
        return;
      }
    }
    if (finish) {
      Finish(end);
    } else {
      StartWrite(&outgoing_);
    }
  }

  const std::shared_ptr<Shared> shared_;
  const LinkId id_;
  mesh::WorkerMessage incoming_;  // of the read in flight
  mesh::RouterMessage outgoing_;  // of the write in flight
  absl::Mutex mu_;
  std::deque<mesh::RouterMessage> queue_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status close_status_ ABSL_GUARDED_BY(mu_);
};

class LinkServer::Service final : public mesh::Mesh::CallbackService {
 public:
  explicit Service(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  grpc::ServerBidiReactor<mesh::WorkerMessage, mesh::RouterMessage>* Link(
      grpc::CallbackServerContext* context) override {
    const std::shared_ptr<Stream> stream =
        shared_->streams.Add([this](LinkId id) { return std::make_shared<Stream>(shared_, id); });
    stream->Begin(context->peer());
    return stream.get();  // the table keeps it until OnDone
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

grpc::Service* LinkServer::service() { return service_.get(); }

bool LinkServer::Send(LinkId link, mesh::RouterMessage message) {
  auto stream = shared_->streams.Find(link);
  return stream != nullptr && stream->Send(std::move(message));
}

void LinkServer::Close(LinkId link, const absl::Status& status) {
  if (auto stream = shared_->streams.Find(link)) stream->Close(status, /*drop=*/false);
}

void LinkServer::CloseAll(const absl::Status& status) {
  for (auto& stream : shared_->streams.All()) stream->Close(status, /*drop=*/false);
}

}  // namespace deltamesh
