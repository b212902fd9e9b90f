#include "services/router/openai_http.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <utility>

#include "runtime/base/status.h"
#include "services/router/cache_hints.h"
#include "services/router/inference_service.h"
#include "services/router/openai_reply.h"

namespace deltamesh {
namespace {

constexpr std::string_view kModels = "/v1/models";

// What the mesh calls the prompt, a chat's client sent as messages.
absl::Status OfMessages(const absl::Status& status) {
  constexpr std::string_view kPrompt = "prompt: ";
  const std::string message = MessageOf(status);
  if (!absl::IsInvalidArgument(status) || !message.starts_with(kPrompt)) return status;
  return InvalidArgument("messages: %s", message.substr(kPrompt.size()));
}

// A session that is not as long as its client thinks will not become so: no retry helps.
absl::Status OfSession(const absl::Status& status) {
  const bool stale =
      absl::IsFailedPrecondition(status) && MessageOf(status).starts_with("session_tokens: ");
  return stale ? absl::InvalidArgumentError(MessageOf(status)) : status;
}

// What names the request in its answer.
HttpHeaders Identify(const RequestId& id, const TraceContext& trace) {
  HttpHeaders headers = {{"X-Request-Id", id}};
  if (!trace.empty()) headers.emplace_back(kTraceResponse, TraceResponse(trace));
  return headers;
}

// One answer on its way to an HTTP client. Called on the router's thread.
class HttpAnswer final : public AnswerSink {
 public:
  HttpAnswer(RequestId id, const TraceContext& trace, ReplyWriter writer, bool chat, bool stream,
             std::shared_ptr<HttpResponder> responder, RouterServer* router)
      : id_(std::move(id)),
        headers_(Identify(id_, trace)),
        writer_(std::move(writer)),
        chat_(chat),
        stream_(stream),
        responder_(std::move(responder)),
        router_(router) {}

  void OnEvent(AnswerEvent event) override {
    if (!stream_) return writer_.Collect(std::move(event));
    Write(writer_.Chunks(std::move(event)));
  }

  void OnEnd(AnswerEnd end) override {
    if (!stream_) {
      HttpResponse response;
      response.headers = headers_;
      response.body = writer_.Whole(end);
      return responder_->Send(std::move(response));
    }
    std::vector<std::string> last = writer_.LastChunks(end);
    last.push_back("[DONE]");
    Write(last);
    responder_->End();
  }

  // A stream that has begun cannot change its status any more: the error becomes its last event.
  void OnError(const absl::Status& status) override {
    if (!begun_) {
      HttpResponse response = ErrorReply(OfSession(chat_ ? OfMessages(status) : status));
      response.headers.insert(response.headers.end(), headers_.begin(), headers_.end());
      return responder_->Send(std::move(response));
    }
    Write({ErrorReply(status).body});
    responder_->End();
  }

 private:
  // The status line waits for the first output, so that a request that fails before has a status of its
  // own.
  void Write(const std::vector<std::string>& chunks) {
    if (chunks.empty()) return;
    if (!begun_) {
      begun_ = true;
      HttpResponse head;
      head.content_type = "text/event-stream; charset=utf-8";
      head.headers = headers_;
      head.headers.emplace_back("Cache-Control", "no-cache");
      head.headers.emplace_back("X-Accel-Buffering",
                                "no");  // proxies that would collect the stream
      responder_->Begin(std::move(head));
    }
    std::string frames;
    for (const std::string& chunk : chunks) frames += "data: " + chunk + "\n\n";
    if (!responder_->Write(std::move(frames))) router_->Cancel(id_);
  }

  const RequestId id_;
  const HttpHeaders headers_;
  ReplyWriter writer_;
  const bool chat_;
  const bool stream_;
  const std::shared_ptr<HttpResponder> responder_;
  RouterServer* const router_;
  bool begun_ = false;
};

// "application/json", or a type that says it is JSON as well: "application/problem+json". Parameters
// such as a charset change nothing: JSON is UTF-8.
bool IsJson(std::string_view content_type) {
  std::string type(content_type.substr(0, content_type.find(';')));
  type.erase(std::remove_if(type.begin(), type.end(),
                            [](unsigned char c) { return std::isspace(c) != 0; }),
             type.end());
  std::transform(type.begin(), type.end(), type.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return type == "application/json" ||
         (type.starts_with("application/") && type.ends_with("+json"));
}

// The types that a web page of any other origin may send without asking, none at all among them, are not
// taken: a browser must not be a way into a private mesh.
HttpResponse MediaTypeError(std::string_view content_type) {
  HttpResponse response = ErrorReply(InvalidArgument(
      "Content-Type: %s; send the header \"Content-Type: application/json\" with a JSON body",
      content_type.empty() ? "is missing"
                           : absl::StrFormat("\"%s\" is not JSON", content_type.substr(0, 100))));
  response.status = 415;
  response.headers = {{"Accept-Post", "application/json"}};
  return response;
}

HttpResponse MethodError(const std::string& path, const char* allowed) {
  HttpResponse response = ErrorReply(InvalidArgument("%s answers %s only", path, allowed));
  response.status = 405;
  response.headers = {{"Allow", allowed}};
  return response;
}

// By which agents name their session when the body does not (prompt_cache_key).
constexpr std::string_view kSessionHeaders[] = {"x-claude-code-session-id", "session-id",
                                                "session_id", "x-session-affinity"};

std::string_view SessionHeader(const HttpRequest& request) {
  for (const std::string_view name : kSessionHeaders) {
    // Others use such headers too; what cannot be one is not an error.
    const std::string_view value = request.Header(name);
    if (!value.empty() && value.size() <= kCacheTextBytesMax) return value;
  }
  return {};
}

// Two of them say nothing.
std::string_view TraceParentOf(const HttpRequest& request) {
  const auto named = [](const auto& header) { return header.first == kTraceParent; };
  const auto& all = request.headers;
  return std::count_if(all.begin(), all.end(), named) == 1 ? request.Header(kTraceParent)
                                                           : std::string_view();
}

Json ModelJson(const v1::ModelInfo& info, int64_t created) {
  Json out;
  out["id"] = info.name();
  out["object"] = "model";
  out["created"] = created;
  out["owned_by"] = "deltamesh";
  out["family"] = info.family();
  out["digest"] = info.digest();
  out["context_length"] = info.context_tokens();
  out["random_weights"] = info.random_weights();
  return out;
}

}  // namespace

void OpenAiHttp::Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) {
  const bool chat = request.path == "/v1/chat/completions";
  if (chat || request.path == "/v1/completions") {
    if (request.method != "POST") return responder->Send(MethodError(request.path, "POST"));
    const std::string_view type = request.Header("content-type");
    if (!IsJson(type)) return responder->Send(MediaTypeError(type));
    return Accept(std::move(request), chat, std::move(responder));
  }
  const bool one = request.path.starts_with(std::string(kModels) + "/");
  if (one || request.path == kModels) {
    if (request.method != "GET") return responder->Send(MethodError(request.path, "GET"));
    return Models(one ? request.path.substr(kModels.size() + 1) : "", responder.get());
  }
  responder->Send(ErrorReply(NotFound(
      "%s is not served; use /v1/chat/completions, /v1/completions or /v1/models", request.path)));
}

HttpResponse OpenAiHttp::Refusal(int status, std::string why, std::string_view target) {
  if (!target.starts_with("/v1/")) return HttpHandler::Refusal(status, std::move(why), target);
  // The server's own want of room is not the client's mistake.
  HttpResponse response =
      ErrorReply(status >= 500 ? absl::UnavailableError(why) : absl::InvalidArgumentError(why));
  response.status = status;
  return response;
}

void OpenAiHttp::Models(const std::string& name, HttpResponder* responder) const {
  if (const absl::Status status = front_->CheckModel(name); !status.ok()) {
    return responder->Send(ErrorReply(status));
  }
  const Json model =
      ModelJson(CurrentModelInfo(*front_, *router_), absl::ToUnixSeconds(router_->now()));
  HttpResponse response;
  response.body =
      name.empty() ? Json{{"object", "list"}, {"data", Json::array({model})}}.dump() : model.dump();
  responder->Send(std::move(response));
}

OpenAiHttp::Origin OpenAiHttp::OriginOf(const HttpRequest& request) const {
  return {front_->MakeRequestId(""), front_->StartTrace(TraceParentOf(request))};
}

void OpenAiHttp::Refuse(const Origin& origin, const absl::Status& status,
                        HttpResponder* responder) const {
  router_->NoteRefusal({.request_id = origin.id, .trace = origin.trace, .status = status});
  HttpResponse response = ErrorReply(status);
  for (auto& header : Identify(origin.id, origin.trace)) {
    response.headers.push_back(std::move(header));
  }
  responder->Send(std::move(response));
}

void OpenAiHttp::Accept(HttpRequest request, bool chat, std::shared_ptr<HttpResponder> responder) {
  Origin origin = OriginOf(request);
  if (!pool_->Takes(request.body.size())) return Complete(request, origin, chat, responder);
  absl::Status status = router_->Admits();
  if (status.ok()) {
    auto held = std::make_shared<HttpRequest>(std::move(request));
    const auto left = std::make_shared<std::atomic<bool>>(false);
    responder->OnGone([left] { *left = true; });
    status = pool_->Post([this, held, origin, chat, responder, left] {
      if (!*left) Complete(*held, origin, chat, responder);
    });
  }
  if (!status.ok()) Refuse(origin, status, responder.get());
}

void OpenAiHttp::Complete(const HttpRequest& request, const Origin& origin, bool chat,
                          std::shared_ptr<HttpResponder> responder) {
  const absl::StatusOr<Json> body = ParseJson(request.body, "body");
  if (!body.ok()) return Refuse(origin, body.status(), responder.get());
  absl::StatusOr<OpenAiRequest> parsed = chat ? ParseChatCompletion(*body) : ParseCompletion(*body);
  if (!parsed.ok()) return Refuse(origin, parsed.status(), responder.get());
  if (const absl::Status size =
          front_->CheckSize(parsed->spec.input, router_->snapshot().context_tokens);
      !size.ok()) {
    return Refuse(origin, size, responder.get());
  }
  const bool logprobs = parsed->spec.logprobs.has_value();
  if (parsed->spec.cache.session().empty()) {
    parsed->spec.cache.set_session(std::string(SessionHeader(request)));
  }
  const RequestId& id = origin.id;
  parsed->spec.drawn_id = id;
  parsed->spec.trace = origin.trace;
  absl::StatusOr<PreparedRequest> prepared = front_->Prepare(std::move(parsed->spec));
  if (!prepared.ok()) return Refuse(origin, prepared.status(), responder.get());
  ReplyWriter writer({.id = (chat ? "chatcmpl-" : "cmpl-") + id,
                      .model = front_->model_info().name(),
                      .created = absl::ToUnixSeconds(router_->now()),
                      .chat = chat,
                      .logprobs = logprobs,
                      .include_usage = parsed->include_usage},
                     &front_->tokenizer());
  auto answer = std::make_shared<HttpAnswer>(id, origin.trace, std::move(writer), chat,
                                             parsed->stream, responder, router_);
  router_->Generate(*std::move(prepared), answer);
  // After Generate, so that a client that is gone already is cancelled and not missed.
  responder->OnGone([router = router_, id] { router->Cancel(id); });
}

}  // namespace deltamesh
