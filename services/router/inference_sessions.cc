#include <functional>
#include <utility>

#include "services/router/grpc_translation.h"
#include "services/router/inference_service.h"

namespace deltamesh {
namespace {

// One call about a session: from gRPC to the router and back.
class SessionReactor final : public grpc::ServerUnaryReactor {
 public:
  // `fill` writes the response from what the router found.
  using Fill = std::function<void(const SessionState&)>;

  SessionReactor(RouterServer* router, RequestId id, Fill fill)
      : router_(router), id_(std::move(id)), fill_(std::move(fill)) {}

  void Begin(absl::StatusOr<SessionCall> call) {
    if (!call.ok()) return Finish(ToGrpc(call.status()));
    call->id = id_;
    router_->CallSession(*std::move(call), [this](const SessionAnswered& answer) {
      if (answer.status.ok()) fill_(answer.state);
      Finish(ToGrpc(answer.status));
    });
  }

 private:
  void OnCancel() override { router_->CancelSession(id_); }
  void OnDone() override { delete this; }

  RouterServer* const router_;
  const RequestId id_;
  const Fill fill_;
};

template <typename Request>
absl::StatusOr<SessionCall> CallOf(SessionCall::Kind kind, const Request& request,
                                   const grpc::CallbackServerContext& context) {
  SessionCall call;
  call.kind = kind;
  call.name = request.session();
  call.salt = request.salt();
  call.deadline = DeadlineOf(context);
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

}  // namespace

grpc::ServerUnaryReactor* InferenceService::GetSession(grpc::CallbackServerContext* context,
                                                       const v1::GetSessionRequest* request,
                                                       v1::SessionInfo* response) {
  auto* reactor = new SessionReactor(router_, front_->MakeRequestId("get"),
                                     [request, response](const SessionState& s) {
                                       FillInfo(s, request->with_token_ids(), response);
                                     });
  reactor->Begin(CallOf(SessionCall::Kind::kGet, *request, *context));
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::SuspendSession(grpc::CallbackServerContext* context,
                                                           const v1::SuspendSessionRequest* request,
                                                           v1::SuspendSessionResponse* response) {
  auto* reactor = new SessionReactor(router_, front_->MakeRequestId("suspend"),
                                     [response](const SessionState& s) {
                                       response->set_tokens(Count(s.tokens));
                                       response->set_position(Count(s.position));
                                       response->set_bytes(s.bytes);
                                       response->set_tier(s.tier);
                                       response->set_worker(s.worker);
                                     });
  reactor->Begin(CallOf(SessionCall::Kind::kSuspend, *request, *context));
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::ResumeSession(grpc::CallbackServerContext* context,
                                                          const v1::ResumeSessionRequest* request,
                                                          v1::ResumeSessionResponse* response) {
  auto* reactor = new SessionReactor(router_, front_->MakeRequestId("resume"),
                                     [response](const SessionState& s) {
                                       response->set_tokens(Count(s.tokens));
                                       response->set_position(Count(s.position));
                                       response->set_worker(s.worker);
                                       response->set_tier(s.tier);
                                     });
  reactor->Begin(CallOf(SessionCall::Kind::kResume, *request, *context));
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::ForkSession(grpc::CallbackServerContext* context,
                                                        const v1::ForkSessionRequest* request,
                                                        v1::ForkSessionResponse* response) {
  auto* reactor = new SessionReactor(
      router_, front_->MakeRequestId("fork"),
      [response](const SessionState& s) { response->set_tokens(Count(s.tokens)); });
  absl::StatusOr<SessionCall> call = CallOf(SessionCall::Kind::kFork, *request, *context);
  if (call.ok()) {
    const absl::StatusOr<SessionId> target =
        Front::NameSession("new_session", request->new_session(), request->salt());
    if (target.ok()) {
      call->target = *target;
      call->target_name = request->new_session();
      call->replace = request->replace();
    } else {
      call = target.status();
    }
  }
  reactor->Begin(std::move(call));
  return reactor;
}

}  // namespace deltamesh
