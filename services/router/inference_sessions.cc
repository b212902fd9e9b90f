#include <functional>
#include <utility>

#include "services/router/grpc_translation.h"
#include "services/router/inference_service.h"

namespace deltamesh {
namespace {

template <typename Request>
absl::StatusOr<SessionCall> CallOf(SessionCall::Kind kind, const Request& request,
                                   const GrpcCall& grpc) {
  SessionCall call;
  call.kind = kind;
  call.name = request.session();
  call.salt = request.salt();
  call.deadline = DeadlineOf(grpc);
  ASSIGN_OR_RETURN(call.session, Front::NameSession("session", request.session(), request.salt()));
  return call;
}

uint32_t Count(int64_t tokens) { return static_cast<uint32_t>(tokens); }
uint32_t Count(const SessionTokens& tokens) { return static_cast<uint32_t>(tokens->size()); }

void FillInfo(const SessionState& s, bool with_token_ids, v1::SessionInfo* out) {
  out->set_tokens(Count(s.tokens));
  if (with_token_ids) out->mutable_token_ids()->Assign(s.tokens->begin(), s.tokens->end());
  out->set_suspended(s.suspended);
  out->set_running(s.running);
  out->set_ended(s.ended);
  out->set_last_used_unix_ms(static_cast<uint64_t>(absl::ToUnixMillis(s.used)));
  out->set_position(Count(s.position));
  for (const SessionHolding& h : s.holders) {
    v1::SessionHolder* holder = out->add_holders();
    holder->set_worker(h.worker);
    holder->set_position(Count(h.position));
    holder->set_tier(h.cold ? "cold" : "memory");
  }
}

absl::StatusOr<SessionCall> Translate(const v1::GetSessionRequest& request, const GrpcCall& grpc) {
  return CallOf(SessionCall::Kind::kGet, request, grpc);
}
absl::StatusOr<SessionCall> Translate(const v1::SuspendSessionRequest& request,
                                      const GrpcCall& grpc) {
  return CallOf(SessionCall::Kind::kSuspend, request, grpc);
}
absl::StatusOr<SessionCall> Translate(const v1::ResumeSessionRequest& request,
                                      const GrpcCall& grpc) {
  return CallOf(SessionCall::Kind::kResume, request, grpc);
}
absl::StatusOr<SessionCall> Translate(const v1::ForkSessionRequest& request, const GrpcCall& grpc) {
  ASSIGN_OR_RETURN(SessionCall call, CallOf(SessionCall::Kind::kFork, request, grpc));
  ASSIGN_OR_RETURN(call.target,
                   Front::NameSession("new_session", request.new_session(), request.salt()));
  call.target_name = request.new_session();
  call.replace = request.replace();
  return call;
}

// One call about a session: from gRPC to the router and back. `id` is the router's name for it; `fill` writes
// the response from the request and what the router found.
template <typename Request, typename Response>
std::shared_ptr<GrpcCall::Events> AboutSession(const std::shared_ptr<GrpcCall>& grpc,
                                               RouterServer* router, const RequestId& id,
                                               void (*fill)(const Request&, const SessionState&,
                                                            Response*)) {
  auto work = [grpc, router, id, fill](const grpc::ByteBuffer& bytes) {
    absl::StatusOr<Request> request = ParseSmallRequest<Request>(bytes);
    if (!request.ok()) return Refuse(*grpc, request.status());
    absl::StatusOr<SessionCall> call = Translate(*request, *grpc);
    if (!call.ok()) return Refuse(*grpc, call.status());
    call->id = id;
    router->CallSession(*std::move(call),
                        [grpc, fill, request = *std::move(request)](const SessionAnswered& answer) {
                          if (!answer.status.ok()) return Refuse(*grpc, answer.status);
                          Response response;
                          fill(request, answer.state, &response);
                          grpc->Reply(response);
                        });
  };
  return std::make_shared<OneRequest>(grpc, std::move(work),
                                      [router, id] { router->CancelSession(id); });
}

void FillGet(const v1::GetSessionRequest& request, const SessionState& s, v1::SessionInfo* out) {
  FillInfo(s, request.with_token_ids(), out);
}

void FillSuspend(const v1::SuspendSessionRequest&, const SessionState& s,
                 v1::SuspendSessionResponse* out) {
  out->set_tokens(Count(s.tokens));
  out->set_position(Count(s.position));
  out->set_bytes(s.bytes);
  out->set_tier(s.tier);
  out->set_worker(s.worker);
}

void FillResume(const v1::ResumeSessionRequest&, const SessionState& s,
                v1::ResumeSessionResponse* out) {
  out->set_tokens(Count(s.tokens));
  out->set_position(Count(s.position));
  out->set_worker(s.worker);
  out->set_tier(s.tier);
}

void FillFork(const v1::ForkSessionRequest&, const SessionState& s, v1::ForkSessionResponse* out) {
  out->set_tokens(Count(s.tokens));
}

}  // namespace

std::shared_ptr<GrpcCall::Events> InferenceService::TakeSession(std::string_view method,
                                                                const Call& call) const {
  const auto id = [this](const char* kind) { return front_->MakeRequestId(kind); };
  if (method == "GetSession") return AboutSession(call, router_, id("get"), &FillGet);
  if (method == "SuspendSession") return AboutSession(call, router_, id("suspend"), &FillSuspend);
  if (method == "ResumeSession") return AboutSession(call, router_, id("resume"), &FillResume);
  if (method == "ForkSession") return AboutSession(call, router_, id("fork"), &FillFork);
  return nullptr;
}

}  // namespace deltamesh
