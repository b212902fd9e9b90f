// A gRPC call on an HTTP/2 stream: what is said about it from any thread, until the engine's thread carries
// it to the wire.
//
// Thread-safe; the engine's part is for its thread alone, as said there.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "services/common/grpc_call.h"

namespace deltamesh {

class Http2Call;
class Http2Connection;

// Calls that want something from the engine's thread.
class Http2Inbox {
 public:
  virtual ~Http2Inbox() = default;
  // From any thread; the caller may hold its own lock.
  virtual void Touch(std::shared_ptr<Http2Call> call) = 0;
};

class Http2Call final : public GrpcCall {
 public:
  // `inbox` is not asked for anything once Close was called.
  Http2Call(Http2Inbox* inbox, std::string peer, int32_t stream);

  void Open() override;
  void Read() override;
  Written Write(const google::protobuf::MessageLite& message, size_t unwritten_max) override;
  void Finish(const grpc::Status& status, const Metadata& trailing = {}) override;
  void Abort(const grpc::Status& status) override;
  void Reply(const google::protobuf::MessageLite& message) override;

  // ---- the engine's part ----
  int32_t stream() const { return stream_; }
  // The engine's thread only; null once the stream is gone.
  Http2Connection* owner() const { return owner_; }
  void SetOwner(Http2Connection* owner) { owner_ = owner; }
  // Before anybody else knows of the call.
  void SetMethod(std::string method) { method_ = std::move(method); }
  void SetDeadline(std::chrono::system_clock::time_point deadline) { deadline_ = deadline; }

  // What is wanted of the wire now. Touch is called again for what is wanted later.
  struct Wants {
    bool read = false;
    bool head = false;     // the response is to begin
    bool data = false;     // there are bytes to send, or the end
    bool end = false;      // nothing follows
    bool aborted = false;  // and what waited was dropped
    bool torn = false;     // in the middle of a message
  };
  Wants Look();
  // A message was asked for and not told.
  bool WantsRead() const;
  // The same, and it is told now.
  bool TakeRead();
  // Moves up to `most` bytes of what waits; `*last`: nothing is left and nothing follows.
  size_t Take(char* out, size_t most, bool* last);
  grpc::Status status() const;
  Metadata trailing() const;
  // Nothing said from now on has any effect.
  void Close();

 private:
  bool Ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ending_ || over_; }
  void Touch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Http2Inbox* const inbox_;
  const int32_t stream_;
  Http2Connection* owner_ = nullptr;
  mutable absl::Mutex mu_;
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mu_);  // messages as they are on the wire
  size_t taken_ ABSL_GUARDED_BY(mu_) = 0;               // of the first one
  bool touched_ ABSL_GUARDED_BY(mu_) = false;           // and not looked at since
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  bool read_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mu_);
  Metadata trailing_ ABSL_GUARDED_BY(mu_);
};

}  // namespace deltamesh
