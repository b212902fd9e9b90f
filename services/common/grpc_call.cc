#include "services/common/grpc_call.h"

#include <limits>

namespace deltamesh {

OneRequest::OneRequest(const std::shared_ptr<GrpcCall>& call, Work work,
                       std::function<void()> cancelled)
    : call_(call), work_(std::move(work)), cancelled_(std::move(cancelled)) {
  call_->Read();
}

void OneRequest::OnMessage(std::string_view bytes) {
  if (const Work work = std::exchange(work_, nullptr)) work(bytes);
}

void OneRequest::OnMessagesEnd() {
  call_->Finish({grpc::StatusCode::INVALID_ARGUMENT, "request: is missing"});
}

void OneRequest::OnCancelled() {
  if (cancelled_) cancelled_();
}

bool ParseBytes(std::string_view bytes, google::protobuf::MessageLite* message) {
  return bytes.size() <= static_cast<size_t>(std::numeric_limits<int>::max()) &&
         message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

}  // namespace deltamesh
