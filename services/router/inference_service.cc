#include "services/router/inference_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "runtime/base/status.h"
#include "services/router/grpc_translation.h"

namespace deltamesh {
namespace {

void FillLogprob(const Tokenizer& tokenizer, TokenId token, float logprob, v1::TokenLogprob* out) {
  out->set_token(token);
  out->set_logprob(logprob);
  const std::string_view piece = tokenizer.TokenBytes(token);
  out->set_piece(piece.data(), piece.size());
}

absl::StatusOr<GenerateSpec> SpecOf(v1::GenerateRequest request);

// One Generate call: gRPC tells of its client, the router of its answer.
class GenerateCall final : public AnswerSink,
                           public GrpcCall::Events,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  GenerateCall(const Front* front, RouterServer* router, EncodePool* pool,
               std::shared_ptr<GrpcCall> call)
      : front_(front),
        router_(router),
        pool_(pool),
        call_(std::move(call)),
        trace_(front->StartTrace(call_->ClientMetadata(kTraceParent))) {
    if (!trace_.empty()) call_->AddInitialMetadata(kTraceResponse, TraceResponse(trace_));
    call_->Read();
  }

  // gRPC side.
  void OnMessage(const grpc::ByteBuffer& bytes) override {
    if (!pool_->Takes(bytes.Length())) return Begin(bytes);
    absl::Status status = router_->Admits();
    if (status.ok()) {
      status = pool_->Post([self = shared_from_this(), bytes] { self->Begin(bytes); });
    }
    if (!status.ok()) TurnAway(front_->MakeRequestId(""), status);
  }
  // Nothing was asked; or the client left, which a read may hear first.
  void OnMessagesEnd() override { OnError(InvalidArgument("request: is missing")); }
  void OnCancelled() override {
    bool begun = false;
    {
      absl::MutexLock lock(&mu_);
      left_ = true;
      begun = begun_;
    }
    if (begun) router_->Cancel(id_);
  }

  // Router side.
  void OnEvent(AnswerEvent event) override;
  void OnEnd(AnswerEnd end) override;
  void OnError(const absl::Status& status) override { Refuse(*call_, status); }

 private:
  // Checks and tokenises, then hands the request to the router. Once, on any thread.
  void Begin(const grpc::ByteBuffer& bytes) {
    if (left()) return;
    RequestId id;
    absl::StatusOr<PreparedRequest> prepared = Prepare(bytes, &id);
    if (!prepared.ok()) return TurnAway(id, prepared.status());
    {
      absl::MutexLock lock(&mu_);
      if (left_) return;
      id_ = id;
      event_.set_request_id(prepared->client_id);
      begun_ = true;
    }
    router_->Generate(*std::move(prepared), shared_from_this());
    // A client that left just now was told to the router before the router knew the request.
    if (left()) router_->Cancel(id_);
  }

  // `id`: as the request is called from here on, also when it is refused.
  absl::StatusOr<PreparedRequest> Prepare(const grpc::ByteBuffer& bytes, RequestId* id) const {
    absl::StatusOr<v1::GenerateRequest> request = ParseRequest<v1::GenerateRequest>(bytes);
    *id = front_->MakeRequestId(request.ok() ? request->request_id() : "");
    RETURN_IF_ERROR(request.status());
    ASSIGN_OR_RETURN(GenerateSpec spec, SpecOf(*std::move(request)));
    spec.drawn_id = *id;
    spec.trace = trace_;
    spec.deadline = DeadlineOf(*call_);
    RETURN_IF_ERROR(front_->CheckSize(spec.input, router_->snapshot().context_tokens));
    return front_->Prepare(std::move(spec));
  }

  // Before the router was asked; it is told.
  void TurnAway(const RequestId& id, const absl::Status& status) {
    router_->NoteRefusal({.request_id = id, .trace = trace_, .status = status});
    OnError(status);
  }

  void Write(const v1::GenerateEvent& event) {
    if (call_->Write(event, InferenceService::kUnreadEventsMax) != GrpcCall::Written::kFull) return;
    // Without a hint when to come again: that helps nobody who does not read.
    call_->Abort(ToGrpc(
        ResourceExhausted("the client left %d events unread", InferenceService::kUnreadEventsMax)));
    router_->Cancel(id_);
  }
  bool left() const {
    absl::MutexLock lock(&mu_);
    return left_;
  }

  const Front* const front_;
  RouterServer* const router_;
  EncodePool* const pool_;
  const std::shared_ptr<GrpcCall> call_;
  const TraceContext trace_;
  RequestId id_;  // set before the router knows the call, constant from then on
  v1::GenerateEvent
      event_;  // with its memory, of one token after the other; then the router's thread's
  mutable absl::Mutex mu_;
  bool begun_ ABSL_GUARDED_BY(mu_) = false;  // the router knows the call, or is about to
  bool left_ ABSL_GUARDED_BY(mu_) = false;   // the client did
};

void GenerateCall::OnEvent(AnswerEvent event) {
  v1::Delta* delta = event_.mutable_delta();
  delta->Clear();
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
  Write(event_);
}

void GenerateCall::OnEnd(AnswerEnd end) {
  v1::Finish* finish = event_.mutable_finish();
  finish->set_reason(end.reason);
  finish->mutable_usage()->set_prompt_tokens(static_cast<uint32_t>(end.usage.prompt_tokens));
  finish->mutable_usage()->set_completion_tokens(
      static_cast<uint32_t>(end.usage.completion_tokens));
  finish->mutable_usage()->set_cached_tokens(static_cast<uint32_t>(end.usage.cached_tokens));
  finish->set_seed(end.seed);
  finish->set_stop_string(std::move(end.stop_string));
  finish->set_session_tokens(static_cast<uint32_t>(end.session_tokens));
  call_->Reply(event_);
}

absl::StatusOr<GenerateSpec> SpecOf(v1::GenerateRequest request) {
  GenerateSpec spec;
  spec.model = request.model();
  spec.request_id = request.request_id();
  switch (request.input_case()) {
    case v1::GenerateRequest::kChat: {
      ASSIGN_OR_RETURN(spec.input, ChatFromProto(request.chat()));
      break;
    }
    case v1::GenerateRequest::kText:
      spec.input = std::move(*request.mutable_text());
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

std::string_view InferenceService::name() const { return v1::Inference::service_full_name(); }

std::shared_ptr<GrpcCall::Events> InferenceService::Take(std::string_view method,
                                                         const Call& call) {
  if (method == "Generate") return std::make_shared<GenerateCall>(front_, router_, pool_, call);
  if (method == "Tokenize") return TakeTokenize(call, /*count_only=*/false);
  if (method == "CountTokens") return TakeTokenize(call, /*count_only=*/true);
  if (method != "ListModels") return TakeSession(method, call);
  return std::make_shared<OneRequest>(call, [this, call](const grpc::ByteBuffer&) {
    v1::ListModelsResponse response;
    *response.add_models() = CurrentModelInfo(*front_, *router_);
    call->Reply(response);
  });
}

std::shared_ptr<GrpcCall::Events> InferenceService::TakeTokenize(const Call& call,
                                                                 bool count_only) const {
  return std::make_shared<OneRequest>(
      call, [this, call, count_only](const grpc::ByteBuffer& bytes) {
        if (!pool_->Takes(bytes.Length())) return Encode(call, bytes, count_only);
        const absl::Status status =
            pool_->PostAside([this, call, bytes, count_only] { Encode(call, bytes, count_only); });
        if (!status.ok()) Refuse(*call, status);
      });
}

void InferenceService::Encode(const Call& call, const grpc::ByteBuffer& bytes,
                              bool count_only) const {
  const absl::StatusOr<std::vector<TokenId>> ids = TokensOf(bytes);
  if (!ids.ok()) return Refuse(*call, ids.status());
  if (count_only) {
    v1::CountTokensResponse response;
    response.set_count(static_cast<uint32_t>(ids->size()));
    return call->Reply(response);
  }
  v1::TokenizeResponse response;
  response.mutable_ids()->Assign(ids->begin(), ids->end());
  call->Reply(response);
}

absl::StatusOr<std::vector<TokenId>> InferenceService::TokensOf(
    const grpc::ByteBuffer& bytes) const {
  ASSIGN_OR_RETURN(v1::TokenizeRequest request, ParseRequest<v1::TokenizeRequest>(bytes));
  PromptInput input;
  if (request.has_chat()) {
    ASSIGN_OR_RETURN(input, ChatFromProto(request.chat()));
  } else if (request.input_case() == v1::TokenizeRequest::kText) {
    if (request.text().empty()) return std::vector<TokenId>();
    input = std::move(*request.mutable_text());
  }
  return front_->Tokenize(request.model(), std::move(input));
}

v1::ModelInfo CurrentModelInfo(const Front& front, const RouterServer& router) {
  v1::ModelInfo info = front.model_info();
  const RouterServer::Snapshot now = router.snapshot();
  info.set_digest(now.digest);
  info.set_context_tokens(static_cast<uint32_t>(now.context_tokens));
  return info;
}

}  // namespace deltamesh
