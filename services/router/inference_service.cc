#include "services/router/inference_service.h"

#include <deque>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "runtime/base/status.h"
#include "services/common/retry_hint.h"
#include "services/router/grpc_translation.h"

namespace deltamesh {
namespace {

// For clients that are to come again; before the call's end is asked for.
void AddRetryHint(grpc::CallbackServerContext* context, const absl::Status& status) {
  const std::optional<absl::Duration> after = RetryAfterOf(status);
  if (!after) return;
  context->AddTrailingMetadata(kRetryAfterMs, std::to_string(absl::ToInt64Milliseconds(*after)));
  context->AddTrailingMetadata(kRetryAfter, std::to_string(RetrySeconds(*after)));
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

  GenerateCall(const Front* front, RouterServer* router) : front_(front), router_(router) {}

  // Checks and tokenises, then hands the request to the router. Once, on any thread.
  static void Begin(const std::shared_ptr<GenerateCall>& call, GenerateSpec spec) {
    absl::StatusOr<PreparedRequest> prepared = call->front_->Prepare(std::move(spec));
    if (!prepared.ok()) return call->OnError(prepared.status());
    {
      absl::MutexLock lock(&call->mu_);
      if (call->closed_) return;  // the client left meanwhile
      call->id_ = prepared->request.request_id;
      call->client_id_ = prepared->client_id;
      call->begun_ = true;
    }
    call->router_->Generate(*std::move(prepared), call);
    // A client that left just now was told to the router before the router knew the request.
    if (call->left()) call->router_->Cancel(call->id_);
  }

  // Router side.
  void OnEvent(AnswerEvent event) override {
    v1::GenerateEvent out;
    out.set_request_id(client_id_);
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
    out.set_request_id(client_id_);
    v1::Finish* finish = out.mutable_finish();
    finish->set_reason(end.reason);
    finish->mutable_usage()->set_prompt_tokens(static_cast<uint32_t>(end.usage.prompt_tokens));
    finish->mutable_usage()->set_completion_tokens(
        static_cast<uint32_t>(end.usage.completion_tokens));
    finish->mutable_usage()->set_cached_tokens(static_cast<uint32_t>(end.usage.cached_tokens));
    finish->set_seed(end.seed);
    finish->set_stop_string(std::move(end.stop_string));
    finish->set_session_tokens(static_cast<uint32_t>(end.session_tokens));
    Queue(std::move(out));
    Close(absl::OkStatus());
  }

  void OnError(const absl::Status& status) override { Close(status); }

  // gRPC side.
  void Attach(Reactor* reactor) {
    Change([&] { reactor_ = reactor; });
  }
  void Detach() {
    absl::MutexLock lock(&mu_);
    reactor_ = nullptr;
  }
  void OnWritten(bool ok) {
    Change([&] {
      writing_ = false;
      queue_.pop_front();
      if (ok) return;
      CloseLocked(absl::CancelledError("the client left"));
      queue_.clear();
    });
  }
  void OnCancelled() {
    bool begun = false;
    {
      absl::MutexLock lock(&mu_);
      left_ = true;
      begun = begun_;
    }
    if (begun) router_->Cancel(id_);
    Change([&] {
      CloseLocked(absl::CancelledError("the call was cancelled or its deadline passed"));
      // What is queued reaches nobody; a write in progress ends by itself.
      while (queue_.size() > (writing_ ? 1u : 0u)) queue_.pop_back();
    });
  }

 private:
  // What gRPC is to be asked for next.
  struct Next {
    Reactor* reactor = nullptr;  // null: nothing
    const v1::GenerateEvent* write = nullptr;
    absl::Status finish;  // when there is nothing to write
  };

  // Changes the state under the lock, then asks gRPC outside of it: gRPC may call back at once. Nothing
  // of this object may be touched after, for the callback may have been the last.
  template <typename F>
  void Change(F change) {
    Next next;
    {
      absl::MutexLock lock(&mu_);
      change();
      next = Decide();
    }
    Ask(next);
  }
  // Only one thread is told to write or finish at a time, so the reactor outlives what it is asked for.
  Next Decide() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static void Ask(const Next& next);

  void Queue(v1::GenerateEvent event) {
    bool full = false;
    Change([&] {
      if (closed_) return;
      full = queue_.size() >= InferenceService::kUnreadEventsMax;
      if (full) {
        CloseLocked(ResourceExhausted("the client left %d events unread", queue_.size()));
      } else {
        queue_.push_back(std::move(event));
      }
    });
    if (full) router_->Cancel(id_);  // the router's thread calls this and holds the sink
  }
  void Close(const absl::Status& status) {
    Change([&] { CloseLocked(status); });
  }
  // The first reason stays.
  void CloseLocked(const absl::Status& status) {
    if (closed_) return;
    closed_ = true;
    status_ = status;
  }
  bool left() const {
    absl::MutexLock lock(&mu_);
    return left_;
  }

  // Set before the router knows the call, constant from then on.
  RequestId id_;
  std::string client_id_;
  const Front* const front_;
  RouterServer* const router_;
  mutable absl::Mutex mu_;
  Reactor* reactor_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::deque<v1::GenerateEvent> queue_ ABSL_GUARDED_BY(mu_);  // the front one is being written
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool begun_ ABSL_GUARDED_BY(mu_) = false;     // the router knows the call, or is about to
  bool left_ ABSL_GUARDED_BY(mu_) = false;      // the client did
  bool closed_ ABSL_GUARDED_BY(mu_) = false;    // nothing more is queued
  bool finished_ ABSL_GUARDED_BY(mu_) = false;  // Finish was called
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

class GenerateCall::Reactor final : public grpc::ServerWriteReactor<v1::GenerateEvent> {
 public:
  Reactor(std::shared_ptr<GenerateCall> call, grpc::CallbackServerContext* context)
      : call_(std::move(call)), context_(context) {}
  void End(const absl::Status& status) {
    AddRetryHint(context_, status);
    Finish(ToGrpc(status));
  }
  void OnWriteDone(bool ok) override { call_->OnWritten(ok); }
  void OnCancel() override { call_->OnCancelled(); }
  void OnDone() override {
    call_->Detach();
    delete this;
  }

 private:
  const std::shared_ptr<GenerateCall> call_;
  grpc::CallbackServerContext* const context_;  // lives until OnDone
};

GenerateCall::Next GenerateCall::Decide() {
  if (reactor_ == nullptr || writing_ || finished_) return {};
  if (!queue_.empty()) {
    writing_ = true;
    return {.reactor = reactor_, .write = &queue_.front(), .finish = {}};
  }
  if (!closed_) return {};
  finished_ = true;
  return {.reactor = reactor_, .write = nullptr, .finish = status_};
}

void GenerateCall::Ask(const Next& next) {
  if (next.reactor == nullptr) return;
  if (next.write != nullptr) {
    next.reactor->StartWrite(next.write);
  } else {
    next.reactor->End(next.finish);
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
  spec.cache = request.cache();
  spec.append = request.append_to_session();
  spec.session_tokens = request.session_tokens();
  return spec;
}

}  // namespace

grpc::ServerWriteReactor<v1::GenerateEvent>* InferenceService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  absl::StatusOr<GenerateSpec> spec = SpecOf(*request);
  if (!spec.ok()) return new FailedCall(spec.status());
  spec->deadline = DeadlineOf(*context);
  const absl::Status size = front_->CheckSize(spec->input, router_->snapshot().context_tokens);
  if (!size.ok()) return new FailedCall(size);
  auto call = std::make_shared<GenerateCall>(front_, router_);
  auto* reactor = new GenerateCall::Reactor(call, context);
  if (pool_->Takes(request->ByteSizeLong())) {
    absl::Status status = router_->Admits();
    if (status.ok()) {
      auto held = std::make_shared<GenerateSpec>(*std::move(spec));
      status = pool_->Post([call, held] { GenerateCall::Begin(call, std::move(*held)); });
    }
    if (!status.ok()) call->OnError(status);
  } else {
    GenerateCall::Begin(call, *std::move(spec));
  }
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

void InferenceService::Encode(const v1::TokenizeRequest* request, grpc::ServerUnaryReactor* reactor,
                              std::function<void(const std::vector<TokenId>&)> fill) const {
  // The request and the response stay until Finish.
  auto job = [this, request, reactor, fill = std::move(fill)] {
    const absl::StatusOr<std::vector<TokenId>> ids = TokensOf(*request);
    if (ids.ok()) fill(*ids);
    reactor->Finish(ToGrpc(ids.status()));
  };
  if (!pool_->Takes(request->ByteSizeLong())) return job();
  const absl::Status status = pool_->Post(job);
  if (!status.ok()) reactor->Finish(ToGrpc(status));
}

grpc::ServerUnaryReactor* InferenceService::Tokenize(grpc::CallbackServerContext* context,
                                                     const v1::TokenizeRequest* request,
                                                     v1::TokenizeResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  Encode(request, reactor, [response](const std::vector<TokenId>& ids) {
    response->mutable_ids()->Assign(ids.begin(), ids.end());
  });
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::CountTokens(grpc::CallbackServerContext* context,
                                                        const v1::TokenizeRequest* request,
                                                        v1::CountTokensResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  Encode(request, reactor, [response](const std::vector<TokenId>& ids) {
    response->set_count(static_cast<uint32_t>(ids.size()));
  });
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
