#include "services/common/grpc_call.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

grpc::ByteBuffer BytesOf(const google::protobuf::MessageLite& message) {
  grpc::ByteBuffer bytes;
  bool own = false;
  const grpc::Status status =
      grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::MessageLite>(message,
                                                                                     &bytes, &own);
  CHECK(status.ok(), "a message of ours cannot be serialised: %s", status.error_message());
  return bytes;
}

}  // namespace

GrpcCall::GrpcCall()
    : arrived_tag_(this, &GrpcCall::OnArrived),
      left_tag_(this, &GrpcCall::OnLeft),
      read_tag_(this, &GrpcCall::OnRead),
      write_tag_(this, &GrpcCall::OnWritten),
      finish_tag_(this, &GrpcCall::OnFinished),
      wire_(std::make_unique<Wire>()) {}

void GrpcCall::Await(grpc::AsyncGenericService* service, grpc::ServerCompletionQueue* queue,
                     Arrived arrived) {
  self_ = shared_from_this();
  arrived_ = std::move(arrived);
  absl::MutexLock lock(&mu_);
  ++asked_;
  wire_->context.AsyncNotifyWhenDone(&left_tag_);
  service->RequestCall(&wire_->context, &wire_->stream, queue, queue, &arrived_tag_);
}

void GrpcCall::OnArrived(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    if (ok) {
      ++asked_;  // of left_tag_, which comes back for calls that arrived
      method_ = wire_->context.method();
      peer_ = wire_->context.peer();
      deadline_ = wire_->context.deadline();
    } else {
      over_ = true;
    }
  }
  std::exchange(arrived_, nullptr)(ok);
  Settle();
}

void GrpcCall::Begin(std::shared_ptr<Events> events, std::function<void(GrpcCall*)> done) {
  events_ = std::move(events);
  done_ = std::move(done);
}

void GrpcCall::Close() {
  absl::MutexLock lock(&mu_);
  over_ = true;
  queue_.clear();
}

std::string GrpcCall::ClientMetadata(const std::string& name) {
  absl::MutexLock lock(&mu_);
  if (wire_ == nullptr) return "";
  const auto& all = wire_->context.client_metadata();
  if (all.count(name) != 1) return "";
  const grpc::string_ref value = all.find(name)->second;
  return std::string(value.data(), value.size());
}

void GrpcCall::AddInitialMetadata(const std::string& name, const std::string& value) {
  absl::MutexLock lock(&mu_);
  if (!over_) wire_->context.AddInitialMetadata(name, value);
}

void GrpcCall::Open() {
  absl::MutexLock lock(&mu_);
  if (Ended() || writing_) return;
  writing_ = true;
  ++asked_;
  wire_->stream.SendInitialMetadata(&write_tag_);
}

void GrpcCall::Read() {
  absl::MutexLock lock(&mu_);
  if (over_ || finished_) return;
  ++asked_;
  wire_->stream.Read(&incoming_, &read_tag_);
}

GrpcCall::Written GrpcCall::Write(const google::protobuf::MessageLite& message,
                                  size_t unwritten_max) {
  absl::MutexLock lock(&mu_);
  if (Ended()) return Written::kOver;
  if (queue_.size() >= unwritten_max) return Written::kFull;
  queue_.push_back(BytesOf(message));
  Pump();
  return Written::kQueued;
}

void GrpcCall::Finish(const grpc::Status& status, const Metadata& trailing) {
  absl::MutexLock lock(&mu_);
  if (Ended()) return;
  ending_ = true;
  status_ = status;
  for (const auto& [name, value] : trailing) wire_->context.AddTrailingMetadata(name, value);
  Pump();
}

void GrpcCall::Abort(const grpc::Status& status) {
  absl::MutexLock lock(&mu_);
  if (Ended()) return;
  ending_ = true;
  status_ = status;
  queue_.clear();
  // A client that reads nothing would keep the write, and with it the call, for ever.
  if (writing_) wire_->context.TryCancel();
  Pump();
}

void GrpcCall::Reply(const google::protobuf::MessageLite& message) {
  absl::MutexLock lock(&mu_);
  if (Ended()) return;
  queue_.push_back(BytesOf(message));
  ending_ = true;
  Pump();
}

void GrpcCall::Pump() {
  if (writing_ || finished_ || over_) return;
  if (!queue_.empty()) {
    const grpc::ByteBuffer next = std::move(queue_.front());
    queue_.pop_front();
    ++asked_;
    writing_ = true;
    if (ending_ && queue_.empty()) {
      finished_ = true;  // the last message and the end leave together
      wire_->stream.WriteAndFinish(next, grpc::WriteOptions(), status_, &finish_tag_);
    } else {
      wire_->stream.Write(next, &write_tag_);
    }
  } else if (ending_) {
    finished_ = true;
    ++asked_;
    wire_->stream.Finish(status_, &finish_tag_);
  }
}

void GrpcCall::OnRead(bool ok) {
  grpc::ByteBuffer bytes;
  bytes.Swap(&incoming_);
  if (ok) {
    events_->OnMessage(bytes);
  } else {
    events_->OnMessagesEnd();
  }
  Settle();
}

void GrpcCall::OnWritten(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    if (!ok) queue_.clear();
    Pump();
  }
  Settle();
}

void GrpcCall::OnFinished(bool) { Settle(); }

void GrpcCall::OnLeft(bool) {
  bool cancelled = false;
  {
    absl::MutexLock lock(&mu_);
    cancelled = wire_->context.IsCancelled();
    over_ = true;
    queue_.clear();
  }
  if (cancelled && events_ != nullptr) events_->OnCancelled();
  Settle();
}

void GrpcCall::Settle() {
  std::unique_ptr<Wire> wire;
  {
    absl::MutexLock lock(&mu_);
    if (--asked_ > 0) return;
    CHECK(over_, "gRPC forgot a call");
    wire = std::move(wire_);
  }
  const std::shared_ptr<GrpcCall> self = std::move(self_);
  const std::shared_ptr<Events> events = std::move(events_);
  if (events != nullptr) events->OnDone();
  if (done_) std::exchange(done_, nullptr)(this);
}

OneRequest::OneRequest(const std::shared_ptr<GrpcCall>& call, Work work,
                       std::function<void()> cancelled)
    : call_(call), work_(std::move(work)), cancelled_(std::move(cancelled)) {
  call_->Read();
}

void OneRequest::OnMessage(const grpc::ByteBuffer& bytes) {
  if (const Work work = std::exchange(work_, nullptr)) work(bytes);
}

void OneRequest::OnMessagesEnd() {
  call_->Finish({grpc::StatusCode::INVALID_ARGUMENT, "request: is missing"});
}

void OneRequest::OnCancelled() {
  if (cancelled_) cancelled_();
}

bool HasFewFields(const grpc::ByteBuffer& bytes, const google::protobuf::Descriptor* type) {
  grpc::ByteBuffer shared = bytes;
  grpc::ProtoBufferReader reader(&shared);
  return !reader.status().ok() || HasFewFields(&reader, type);
}

bool ParseBytes(const grpc::ByteBuffer& bytes, google::protobuf::MessageLite* message) {
  grpc::ByteBuffer shared = bytes;  // reading consumes it, the slices are counted
  grpc::ProtoBufferReader reader(&shared);
  return reader.status().ok() && message->ParseFromZeroCopyStream(&reader);
}

}  // namespace deltamesh
