// One call at a gRPC server, from its first byte to its end, and who answers it.
//
// Thread-safe. What happens to a call is told on the server's thread, one thing at a time; it may be answered
// from any thread. gRPC allows one write at a time and nothing after the end: that order is kept here.
#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "services/common/message_fields.h"

namespace deltamesh {

class GrpcCall;

// What the queue of a server hands back when something it was asked for is done.
class GrpcTag {
 public:
  virtual ~GrpcTag() = default;
  virtual void Run(bool ok) = 0;
};

class GrpcCall : public std::enable_shared_from_this<GrpcCall> {
 public:
  using Metadata = std::vector<std::pair<std::string, std::string>>;
  enum class Written { kQueued, kFull, kOver };

  // Who answers. Called on the server's thread; must not block.
  class Events {
   public:
    virtual ~Events() = default;
    // What was asked for with Read.
    virtual void OnMessage(const grpc::ByteBuffer& bytes) = 0;
    // In its place: the client sends no more.
    virtual void OnMessagesEnd() = 0;
    // The client left or its deadline passed; nothing reaches it any more.
    virtual void OnCancelled() {}
    // Nothing follows; the call lets go of this object.
    virtual void OnDone() {}
  };

  GrpcCall();

  // Constant from the call's arrival on.
  const std::string& method() const { return method_; }  // "/package.Service/Method"
  const std::string& peer() const { return peer_; }
  std::chrono::system_clock::time_point deadline() const { return deadline_; }

  // What the client sent along under this name, in small letters; empty where it sent nothing, or several.
  std::string ClientMetadata(const std::string& name);
  // Before anything else is said: goes ahead of it.
  void AddInitialMetadata(const std::string& name, const std::string& value);

  // Tells the client that the call was taken before there is anything else to say.
  void Open();
  // One at a time.
  void Read();
  // Queues a message; kFull when `unwritten_max` wait already, kOver when the call has ended.
  Written Write(const google::protobuf::MessageLite& message, size_t unwritten_max);
  // Ends the call once what is queued has been written. The first end stays.
  void Finish(const grpc::Status& status, const Metadata& trailing = {});
  // The same at once: what is queued is dropped. A client in the middle of a message, perhaps for ever, sees
  // CANCELLED instead.
  void Abort(const grpc::Status& status);
  // The one answer of a call that has one.
  void Reply(const google::protobuf::MessageLite& message);

  // ---- the server's part ----
  // Asks for the next call; `arrived` runs on the server's thread, with false when the server stops.
  using Arrived = std::function<void(bool ok)>;
  void Await(grpc::AsyncGenericService* service, grpc::ServerCompletionQueue* queue,
             Arrived arrived);
  // The call arrived: who answers it, and what to do when nothing follows.
  void Begin(std::shared_ptr<Events> events, std::function<void(GrpcCall*)> done);
  // Nothing more may be asked of gRPC: its queue is about to close.
  void Close();

 private:
  // gRPC's side; gone once nothing follows.
  struct Wire {
    grpc::GenericServerContext context;
    grpc::GenericServerAsyncReaderWriter stream{&context};
  };
  class Tag final : public GrpcTag {
   public:
    Tag(GrpcCall* call, void (GrpcCall::*react)(bool)) : call_(call), react_(react) {}
    void Run(bool ok) override { (call_->*react_)(ok); }

   private:
    GrpcCall* const call_;
    void (GrpcCall::*const react_)(bool);
  };

  void OnArrived(bool ok);
  void OnLeft(bool ok);
  void OnRead(bool ok);
  void OnWritten(bool ok);
  void OnFinished(bool ok);
  // What was asked of gRPC came back; the last one ends this object.
  void Settle();
  // Starts the next write, or the end when all is written.
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ending_ || over_; }

  std::string method_, peer_;
  std::chrono::system_clock::time_point deadline_;
  Tag arrived_tag_, left_tag_, read_tag_, write_tag_, finish_tag_;

  // The server's thread only.
  Arrived arrived_;
  std::shared_ptr<Events> events_;
  std::function<void(GrpcCall*)> done_;
  std::shared_ptr<GrpcCall> self_;  // while gRPC may come back
  grpc::ByteBuffer incoming_;       // of the read in flight

  absl::Mutex mu_;
  std::unique_ptr<Wire> wire_ ABSL_GUARDED_BY(mu_);
  std::deque<grpc::ByteBuffer> queue_ ABSL_GUARDED_BY(mu_);
  int asked_ ABSL_GUARDED_BY(mu_) = 0;  // of gRPC and not come back yet
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;    // nothing more is queued
  bool finished_ ABSL_GUARDED_BY(mu_) = false;  // the end was asked for
  bool over_ ABSL_GUARDED_BY(mu_) = false;      // nothing more may be asked for
  grpc::Status status_ ABSL_GUARDED_BY(mu_);
};

// Answers the calls of one service.
class GrpcService {
 public:
  virtual ~GrpcService() = default;
  // "package.Service".
  virtual std::string_view name() const = 0;
  // Who answers a call of this method; null when there is no such method. What the call is asked for before
  // this returns happens after. On the server's thread.
  virtual std::shared_ptr<GrpcCall::Events> Take(std::string_view method,
                                                 const std::shared_ptr<GrpcCall>& call) = 0;
};

// For a call with one request: hands its bytes to `work`, which answers through the call, at once or later.
class OneRequest final : public GrpcCall::Events {
 public:
  using Work = std::function<void(const grpc::ByteBuffer& bytes)>;
  OneRequest(const std::shared_ptr<GrpcCall>& call, Work work,
             std::function<void()> cancelled = nullptr);
  void OnMessage(const grpc::ByteBuffer& bytes) override;
  void OnMessagesEnd() override;
  void OnCancelled() override;

 private:
  const std::shared_ptr<GrpcCall> call_;
  Work work_;
  const std::function<void()> cancelled_;
};

// Most bytes of a request that the server's thread parses itself: whoever sends more to a method that needs
// little would hold up all others.
inline constexpr size_t kSmallRequestBytes = 64 << 10;

// False when there are more than kRequestFieldsMax.
bool HasFewFields(const grpc::ByteBuffer& bytes, const google::protobuf::Descriptor* type);
// False when they are no such message.
bool ParseBytes(const grpc::ByteBuffer& bytes, google::protobuf::MessageLite* message);

// INVALID_ARGUMENT when it is no such message, or has too many fields.
template <typename Message>
absl::StatusOr<Message> ParseRequest(const grpc::ByteBuffer& bytes) {
  if (!HasFewFields(bytes, Message::descriptor())) {
    return absl::InvalidArgumentError("request: more than " + std::to_string(kRequestFieldsMax) +
                                      " fields; send fewer messages or entries");
  }
  Message message;
  if (ParseBytes(bytes, &message)) return message;
  return absl::InvalidArgumentError("request: is not a " + message.GetTypeName());
}

// The same for a method whose requests are small.
template <typename Message>
absl::StatusOr<Message> ParseSmallRequest(const grpc::ByteBuffer& bytes) {
  if (bytes.Length() <= kSmallRequestBytes) return ParseRequest<Message>(bytes);
  return absl::InvalidArgumentError("request: " + std::to_string(bytes.Length()) +
                                    " bytes; this method takes at most " +
                                    std::to_string(kSmallRequestBytes));
}

}  // namespace deltamesh
