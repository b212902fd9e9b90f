#include "services/router/inference_service.h"

#include <deque>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), MessageOf(status));
}

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  // A call without a deadline has the largest time point, which no arithmetic survives.
  const auto deadline = context.deadline();
  if (deadline > std::chrono::system_clock::now() + std::chrono::hours(24 * 365)) {
    return absl::InfiniteFuture();
  }
  return absl::FromChrono(deadline);
}

void FillLogprob(const Tokenizer& tokenizer, TokenId token, float logprob, v1::TokenLogprob* out) {
  out->set_token(token);
  out->set_logprob(logprob);
  const std::string_view piece = tokenizer.TokenBytes(token);
  out->set_piece(piece.data(), piece.size());
}

// One Generate call. The router holds it as a sink, gRPC drives it as a reactor; whichever lets go last
// frees it. gRPC allows one write at a time, and one Finish after the last write.
class GenerateCall final : public AnswerSink {
 public:
  class Reactor;

  GenerateCall(RequestId id, const Front* front, RouterServer* router)
      : id_(std::move(id)), front_(front), router_(router) {}

  // Router side.
  void OnEvent(AnswerEvent event) override {
    v1::GenerateEvent out;
    out.set_request_id(id_);
    v1::Delta* delta = out.mutable_delta();
    delta->set_text(std::move(event.text));
    delta->set_reasoning(std::move(event.reasoning));
    delta->mutable_tokens()->Assign(event.tokens.begin(), event.tokens.end());
    for (size_t i = 0; i < event.scores.size(); ++i) {
      v1::TokenInfo* info = delta->add_infos();
      const mesh::TokenScores& s = event.scores[i];
      FillLogprob(front_->tokenizer(), event.tokens[i], s.logprob(), info->mutable_chosen());
      for (int k = 0; k < std::min(s.top_ids_size(), s.top_logprobs_size()); ++k) {
        FillLogprob(front_->tokenizer(), s.top_ids(k), s.top_logprobs(k), info->add_top());
      }
    }
    for (const AnswerToolCall& call : event.tool_calls) {
      v1::ToolCall* tool = delta->add_tool_calls();
      tool->set_index(static_cast<uint32_t>(call.index));
      tool->set_id(call.id);
      tool->set_name(call.name);
      tool->set_arguments(call.arguments);
    }
    Queue(std::move(out));
  }

  void OnEnd(AnswerEnd end) override {
    v1::GenerateEvent out;
    out.set_request_id(id_);
    v1::Finish* finish = out.mutable_finish();
    finish->set_reason(end.reason);
    finish->mutable_usage()->set_prompt_tokens(static_cast<uint32_t>(end.usage.prompt_tokens));
    finish->mutable_usage()->set_completion_tokens(
        static_cast<uint32_t>(end.usage.completion_tokens));
    finish->mutable_usage()->set_cached_tokens(static_cast<uint32_t>(end.usage.cached_tokens));
    finish->set_seed(end.seed);
    finish->set_stop_string(std::move(end.stop_string));
    Queue(std::move(out));
    Close(absl::OkStatus());
  }

  void OnError(const absl::Status& status) override { Close(status); }

  // gRPC side.
  void Attach(Reactor* reactor) {
    absl::MutexLock lock(&mu_);
    reactor_ = reactor;
    Pump();
  }
  void Detach() {
    absl::MutexLock lock(&mu_);
    reactor_ = nullptr;
  }
  void OnWritten(bool ok) {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    queue_.pop_front();
    if (!ok && !closed_) CloseLocked(absl::CancelledError("the client left"));
    if (!ok) queue_.clear();
    Pump();
  }
  void OnCancelled() {
    router_->Cancel(id_, this);
    absl::MutexLock lock(&mu_);
    if (!closed_)
      CloseLocked(absl::CancelledError("the call was cancelled or its deadline passed"));
    // What is queued reaches nobody; a write in progress ends by itself.
    while (queue_.size() > (writing_ ? 1u : 0u)) queue_.pop_back();
    Pump();
  }

 private:
  void Queue(v1::GenerateEvent event) {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    if (queue_.size() >= InferenceService::kUnreadEventsMax) {
      CloseLocked(ResourceExhausted("the client left %d events unread", queue_.size()));
      router_->Cancel(id_, this);
      return;
    }
    queue_.push_back(std::move(event));
    Pump();
  }
  void Close(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    if (!closed_) CloseLocked(status);
    Pump();
  }
  void CloseLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    closed_ = true;
    status_ = status;
  }
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const RequestId id_;
  const Front* const front_;
  RouterServer* const router_;
  absl::Mutex mu_;
  Reactor* reactor_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::deque<v1::GenerateEvent> queue_ ABSL_GUARDED_BY(mu_);  // the front one is being written
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;    // nothing more is queued
  bool finished_ ABSL_GUARDED_BY(mu_) = false;  // Finish was called
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

class GenerateCall::Reactor final : public grpc::ServerWriteReactor<v1::GenerateEvent> {
 public:
  explicit Reactor(std::shared_ptr<GenerateCall> call) : call_(std::move(call)) {}
  void OnWriteDone(bool ok) override { call_->OnWritten(ok); }
  void OnCancel() override { call_->OnCancelled(); }
  void OnDone() override {
    call_->Detach();
    delete this;
  }

 private:
  const std::shared_ptr<GenerateCall> call_;
};

void GenerateCall::Pump() {
  if (reactor_ == nullptr || writing_ || finished_) return;
  if (!queue_.empty()) {
    writing_ = true;
    reactor_->StartWrite(&queue_.front());
  } else if (closed_) {
    finished_ = true;
    reactor_->Finish(ToGrpc(status_));
  }
}

// A call that ends before it begins.
class FailedCall final : public grpc::ServerWriteReactor<v1::GenerateEvent> {
 public:
  explicit FailedCall(const absl::Status& status) { Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

absl::StatusOr<GenerateSpec> SpecOf(const v1::GenerateRequest& request) {
  GenerateSpec spec;
  spec.model = request.model();
  spec.request_id = request.request_id();
  switch (request.input_case()) {
    case v1::GenerateRequest::kChat: {
      ASSIGN_OR_RETURN(spec.input, ChatFromProto(request.chat()));
      break;
    }
    case v1::GenerateRequest::kText:
      spec.input = request.text();
      break;
    case v1::GenerateRequest::kTokens:
      spec.input =
          std::vector<TokenId>(request.tokens().ids().begin(), request.tokens().ids().end());
      break;
    default:
      break;
  }
  spec.sampling = request.sampling();
  if (request.has_logprobs()) spec.logprobs = request.logprobs();
  spec.max_tokens = request.stop().max_tokens();
  spec.stop.assign(request.stop().strings().begin(), request.stop().strings().end());
  spec.stop_token_ids.assign(request.stop().token_ids().begin(), request.stop().token_ids().end());
  spec.ignore_eos = request.stop().ignore_eos();
  return spec;
}

}  // namespace

grpc::ServerWriteReactor<v1::GenerateEvent>* InferenceService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  absl::StatusOr<GenerateSpec> spec = SpecOf(*request);
  if (!spec.ok()) return new FailedCall(spec.status());
  spec->deadline = DeadlineOf(*context);
  absl::StatusOr<PreparedRequest> prepared = front_->Prepare(*std::move(spec));
  if (!prepared.ok()) return new FailedCall(prepared.status());
  auto call = std::make_shared<GenerateCall>(prepared->request.request_id, front_, router_);
  auto* reactor = new GenerateCall::Reactor(call);
  router_->Generate(*std::move(prepared), call);
  call->Attach(reactor);
  return reactor;
}

absl::StatusOr<std::vector<TokenId>> InferenceService::TokensOf(
    const v1::TokenizeRequest& request) const {
  PromptInput input;
  if (request.has_chat()) {
    ASSIGN_OR_RETURN(input, ChatFromProto(request.chat()));
  } else if (request.input_case() == v1::TokenizeRequest::kText) {
    if (request.text().empty()) return std::vector<TokenId>();
    input = request.text();
  }
  return front_->Tokenize(request.model(), input);
}

grpc::ServerUnaryReactor* InferenceService::Tokenize(grpc::CallbackServerContext* context,
                                                     const v1::TokenizeRequest* request,
                                                     v1::TokenizeResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<std::vector<TokenId>> ids = TokensOf(*request);
  if (ids.ok()) response->mutable_ids()->Assign(ids->begin(), ids->end());
  reactor->Finish(ToGrpc(ids.status()));
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::CountTokens(grpc::CallbackServerContext* context,
                                                        const v1::TokenizeRequest* request,
                                                        v1::CountTokensResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<std::vector<TokenId>> ids = TokensOf(*request);
  if (ids.ok()) response->set_count(static_cast<uint32_t>(ids->size()));
  reactor->Finish(ToGrpc(ids.status()));
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::ListModels(grpc::CallbackServerContext* context,
                                                       const v1::ListModelsRequest*,
                                                       v1::ListModelsResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  *response->add_models() = CurrentModelInfo(*front_, *router_);
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

v1::ModelInfo CurrentModelInfo(const Front& front, const RouterServer& router) {
  v1::ModelInfo info = front.model_info();
  const RouterServer::Snapshot now = router.snapshot();
  info.set_digest(now.digest);
  info.set_context_tokens(static_cast<uint32_t>(now.context_tokens));
  return info;
}

}  // namespace deltamesh
