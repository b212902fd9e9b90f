#include "services/common/http2_call.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/base/status.h"
#include "services/common/grpc_wire.h"

namespace deltamesh {

Http2Call::Http2Call(Http2Inbox* inbox, std::string peer, int32_t stream)
    : inbox_(inbox), stream_(stream) {
  peer_ = std::move(peer);
}

void Http2Call::Touch() {
  if (!std::exchange(touched_, true)) {
    inbox_->Touch(std::static_pointer_cast<Http2Call>(shared_from_this()));
  }
}

void Http2Call::Open() {
  absl::MutexLock lock(&mu_);
  if (Ended()) return;
  open_ = true;
  Touch();
}

void Http2Call::Read() {
  absl::MutexLock lock(&mu_);
  if (over_) return;
  read_ = true;
  Touch();
}

GrpcCall::Written Http2Call::Write(const google::protobuf::MessageLite& message,
                                   size_t unwritten_max) {
  absl::MutexLock lock(&mu_);
  if (Ended()) return Written::kOver;
  if (queue_.size() >= unwritten_max) return Written::kFull;
  queue_.push_back(GrpcMessage(message));
  Touch();
  return Written::kQueued;
}

void Http2Call::Finish(const grpc::Status& status, const Metadata& trailing) {
  absl::MutexLock lock(&mu_);
  if (Ended()) return;
  ending_ = true;
  status_ = status;
  trailing_ = trailing;
  Touch();
}

void Http2Call::Abort(const grpc::Status& status) {
  absl::MutexLock lock(&mu_);
  if (Ended()) return;
  ending_ = aborted_ = true;
  status_ = status;
  Touch();
}

void Http2Call::Reply(const google::protobuf::MessageLite& message) {
  absl::MutexLock lock(&mu_);
  if (Ended()) return;
  queue_.push_back(GrpcMessage(message));
  ending_ = true;
  Touch();
}

Http2Call::Wants Http2Call::Look() {
  absl::MutexLock lock(&mu_);
  touched_ = false;
  if (over_) return {};
  Wants wants{.read = read_,
              .head = open_ || ending_ || !queue_.empty(),
              .data = ending_ || !queue_.empty(),
              .end = ending_ && (aborted_ || queue_.empty()),
              .aborted = aborted_,
              .torn = taken_ > 0};
  if (aborted_) {
    queue_.clear();
    taken_ = 0;
  }
  return wants;
}

bool Http2Call::WantsRead() const {
  absl::MutexLock lock(&mu_);
  return read_;
}

bool Http2Call::TakeRead() {
  absl::MutexLock lock(&mu_);
  return std::exchange(read_, false);
}

size_t Http2Call::Take(char* out, size_t most, bool* last) {
  absl::MutexLock lock(&mu_);
  size_t done = 0;
  while (done < most && !queue_.empty()) {
    const std::string& first = queue_.front();
    const size_t bytes = std::min(most - done, first.size() - taken_);
    std::memcpy(out + done, first.data() + taken_, bytes);
    done += bytes;
    taken_ += bytes;
    if (taken_ < first.size()) break;
    taken_ = 0;
    queue_.pop_front();
  }
  *last = ending_ && queue_.empty();
  return done;
}

grpc::Status Http2Call::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

GrpcCall::Metadata Http2Call::trailing() const {
  absl::MutexLock lock(&mu_);
  return trailing_;
}

void Http2Call::Close() {
  absl::MutexLock lock(&mu_);
  over_ = true;
  queue_.clear();
}

}  // namespace deltamesh
