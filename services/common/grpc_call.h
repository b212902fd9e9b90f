// One call at a gRPC server, from its first byte to its end, and who answers it.
//
// Thread-safe. What happens to a call is told on the server's thread, one thing at a time; it may be answered
// from any thread.
#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace deltamesh {

class GrpcCall : public std::enable_shared_from_this<GrpcCall> {
 public:
  using Metadata = std::vector<std::pair<std::string, std::string>>;
  enum class Written { kQueued, kFull, kOver };

  // Who answers. Called on the server's thread; must not block.
  class Events {
   public:
    virtual ~Events() = default;
    // What was asked for with Read. The bytes are there until this returns.
    virtual void OnMessage(std::string_view bytes) = 0;
    // In its place: the client sends no more.
    virtual void OnMessagesEnd() = 0;
    // The client left or its deadline passed; nothing reaches it any more.
    virtual void OnCancelled() {}
    // Nothing follows; the call lets go of this object.
    virtual void OnDone() {}
  };

  virtual ~GrpcCall() = default;

  // Constant from the call's arrival on.
  const std::string& method() const { return method_; }  // "/package.Service/Method"
  const std::string& peer() const { return peer_; }
  std::chrono::system_clock::time_point deadline() const { return deadline_; }

  // Tells the client that the call was taken before there is anything else to say.
  virtual void Open() = 0;
  // One at a time.
  virtual void Read() = 0;
  // Queues a message; kFull when `unwritten_max` wait already, kOver when the call has ended.
  virtual Written Write(const google::protobuf::MessageLite& message, size_t unwritten_max) = 0;
  // Ends the call once what is queued has been written. The first end stays.
  virtual void Finish(const grpc::Status& status, const Metadata& trailing = {}) = 0;
  // The same at once: what is queued is dropped. A client in the middle of a message, perhaps for ever, sees
  // CANCELLED instead.
  virtual void Abort(const grpc::Status& status) = 0;
  // The one answer of a call that has one.
  virtual void Reply(const google::protobuf::MessageLite& message) = 0;

 protected:
  std::string method_, peer_;
  std::chrono::system_clock::time_point deadline_ = std::chrono::system_clock::time_point::max();
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
  using Work = std::function<void(std::string_view bytes)>;
  OneRequest(const std::shared_ptr<GrpcCall>& call, Work work,
             std::function<void()> cancelled = nullptr);
  void OnMessage(std::string_view bytes) override;
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

// False when they are no such message.
bool ParseBytes(std::string_view bytes, google::protobuf::MessageLite* message);

// INVALID_ARGUMENT when it is no such message.
template <typename Message>
absl::StatusOr<Message> ParseRequest(std::string_view bytes) {
  Message message;
  if (ParseBytes(bytes, &message)) return message;
  return absl::InvalidArgumentError("request: is not a " + message.GetTypeName());
}

// The same for a method whose requests are small.
template <typename Message>
absl::StatusOr<Message> ParseSmallRequest(std::string_view bytes) {
  if (bytes.size() <= kSmallRequestBytes) return ParseRequest<Message>(bytes);
  return absl::InvalidArgumentError("request: " + std::to_string(bytes.size()) +
                                    " bytes; this method takes at most " +
                                    std::to_string(kSmallRequestBytes));
}

}  // namespace deltamesh
