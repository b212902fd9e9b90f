#include "services/expert/expert_core.h"

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

mesh::WorkerMessage Refusal(const std::string& request_id, uint32_t attempt, const char* what) {
  mesh::WorkerMessage message;
  mesh::RequestFailed* failed = message.mutable_failed();
  failed->set_request_id(request_id);
  failed->set_attempt(attempt);
  failed->set_code(static_cast<int>(absl::StatusCode::kFailedPrecondition));
  failed->set_message(absl::StrFormat("an expert shard cannot %s", what));
  return message;
}

}  // namespace

void ExpertCore::OnLinkOpened(LinkId link, absl::Time) { links_.Open(link); }
void ExpertCore::OnLinkClosed(LinkId link, absl::Time) { links_.Close(link); }

void ExpertCore::OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) {
  switch (message.body_case()) {
    case mesh::RouterMessage::kRegistered:
      links_.OnRegistered(link, message.registered(), now);
      break;
    case mesh::RouterMessage::kStartDecode:
      links_.Send(link, Refusal(message.start_decode().request_id(),
                                message.start_decode().attempt(), "decode"));
      break;
    case mesh::RouterMessage::kStartPrefill:
      links_.Send(link, Refusal(message.start_prefill().request_id(),
                                message.start_prefill().attempt(), "prefill"));
      break;
    case mesh::RouterMessage::kView:
    case mesh::RouterMessage::kCancel:
    case mesh::RouterMessage::BODY_NOT_SET:
      break;
  }
}

void ExpertCore::Tick(absl::Time now) {
  const ExpertUse use = use_();
  if (use.arrived != std::exchange(arrived_, use.arrived) || use.open > 0) last_use_ = now;
  quiet_ = now - last_use_ >= options_.quiet;
  mesh::Heartbeat load;
  load.set_draining(draining_);
  links_.Tick(load, now);
}

void ExpertCore::Drain(absl::Time now) {
  draining_ = true;
  last_use_ = now;
  quiet_ = false;
  links_.HeartbeatSoon();
}

}  // namespace deltamesh
