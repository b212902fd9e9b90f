#include "services/router/openai_reply.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "runtime/text/utf8.h"
#include "services/common/retry_hint.h"

namespace deltamesh {
namespace {

// JSON has no infinity; clients of this API know this stand-in.
double Finite(float logprob) { return std::isfinite(logprob) ? logprob : -9999.0; }

// Model output is UTF-8 by the time it gets here, but a stray byte must not end a stream.
std::string Dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// The field or header at the start of "field: what is wrong", if the message starts so.
std::string FieldOf(const std::string& message) {
  const size_t colon = message.find(": ");
  if (colon == message.npos || colon == 0 || colon > 80) return "";
  const bool name = std::all_of(
      message.begin(), message.begin() + static_cast<int64_t>(colon), [](unsigned char c) {
        return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.' || c == '[' || c == ']';
      });
  return name ? message.substr(0, colon) : "";
}

const char* ErrorType(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kResourceExhausted:
      return "rate_limit_error";
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kUnimplemented:
      return "invalid_request_error";
    default:
      return "server_error";
  }
}

std::string ErrorCode(const absl::Status& status) {
  if (absl::IsNotFound(status) && FieldOf(MessageOf(status)) == "model") return "model_not_found";
  std::string code = absl::StatusCodeToString(status.code());
  std::transform(code.begin(), code.end(), code.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return code;
}

// A token on its own may be part of a character.
std::string LegacyPiece(std::string_view bytes) {
  if (!FirstInvalidUtf8(bytes)) return std::string(bytes);
  std::string out = "bytes:";
  for (const unsigned char c : bytes) out += absl::StrFormat("\\x%02x", c);
  return out;
}

int64_t CharactersStarted(std::string_view bytes) {
  return std::count_if(bytes.begin(), bytes.end(),
                       [](unsigned char c) { return (c & 0xC0) != 0x80; });
}

}  // namespace

int HttpStatusOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kAlreadyExists:
      return 409;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kFailedPrecondition:  // parts of the mesh that do not fit each other
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

Json ErrorJson(const absl::Status& status) {
  const std::string field = FieldOf(MessageOf(status));
  Json error;
  error["message"] = SafeMessage(status);
  error["type"] = ErrorType(status.code());
  error["param"] = absl::IsInvalidArgument(status) || absl::IsNotFound(status)
                       ? (field.empty() ? Json() : Json(field))
                       : Json();
  error["code"] = ErrorCode(status);
  return Json{{"error", std::move(error)}};
}

HttpResponse ErrorReply(const absl::Status& status) {
  HttpResponse response;
  response.status = HttpStatusOf(status.code());
  response.body = Dump(ErrorJson(status));
  if (response.status == 429 || response.status == 503) {
    const absl::Duration after = RetryAfterOf(status).value_or(absl::Seconds(1));
    response.headers = {{"Retry-After", std::to_string(RetrySeconds(after))},
                        {"Retry-After-Ms", std::to_string(absl::ToInt64Milliseconds(after))}};
  }
  return response;
}

Json UsageJson(const TokenUsage& usage) {
  Json out;
  out["prompt_tokens"] = usage.prompt_tokens;
  out["completion_tokens"] = usage.completion_tokens;
  out["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
  out["prompt_tokens_details"] = Json{{"cached_tokens", usage.cached_tokens}};
  out["cached_tokens"] = usage.cached_tokens;  // where agents of this model family look
  return out;
}

std::string FinishReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_LENGTH:
      return "length";
    case v1::FINISH_REASON_TOOL_CALLS:
      return "tool_calls";
    default:
      return "stop";
  }
}

// ---- log-probabilities ---------------------------------------------------------------------------

Json LogprobsWriter::ChatEntry(TokenId token, float logprob) const {
  const std::string_view piece = tokenizer_->TokenBytes(token);
  Json bytes = Json::array();
  for (const unsigned char c : piece) bytes.push_back(static_cast<int>(c));
  Json out;
  out["token"] = DecodeUtf8(piece);
  out["logprob"] = Finite(logprob);
  out["bytes"] = std::move(bytes);
  return out;
}

void LogprobsWriter::Add(const AnswerEvent& event) {
  const size_t count = event.scores.size() - (event.ends_with_stop_token && !event.scores.empty());
  for (size_t i = 0; i < count; ++i) {
    const mesh::TokenScores& s = event.scores[i];
    const int top = std::min(s.top_ids_size(), s.top_logprobs_size());
    if (chat_) {
      Json entry = ChatEntry(event.tokens[i], s.logprob());
      entry["top_logprobs"] = Json::array();
      for (int k = 0; k < top; ++k) {
        entry["top_logprobs"].push_back(ChatEntry(s.top_ids(k), s.top_logprobs(k)));
      }
      pending_["content"].push_back(std::move(entry));
      continue;
    }
    const std::string_view piece = tokenizer_->TokenBytes(event.tokens[i]);
    Json alternatives = Json::object();
    for (int k = 0; k < top; ++k) {
      alternatives[LegacyPiece(tokenizer_->TokenBytes(s.top_ids(k)))] = Finite(s.top_logprobs(k));
    }
    pending_["tokens"].push_back(LegacyPiece(piece));
    pending_["token_logprobs"].push_back(Finite(s.logprob()));
    pending_["top_logprobs"].push_back(std::move(alternatives));
    pending_["text_offset"].push_back(text_offset_);
    text_offset_ += CharactersStarted(piece);
  }
}

Json LogprobsWriter::Take() { return std::exchange(pending_, Json()); }

// ---- replies -------------------------------------------------------------------------------------

ReplyWriter::ReplyWriter(Options options, const Tokenizer* tokenizer)
    : options_(std::move(options)), logprobs_(tokenizer, options_.chat) {}

Json ReplyWriter::Head(const char* object) const {
  Json out;
  out["id"] = options_.id;
  out["object"] = object;
  out["created"] = options_.created;
  out["model"] = options_.model;
  return out;
}

Json ReplyWriter::Chunk(Json choice) const {
  Json out = Head(options_.chat ? "chat.completion.chunk" : "text_completion");
  out["choices"] = Json::array();
  if (!choice.is_null()) out["choices"].push_back(std::move(choice));
  if (options_.include_usage) out["usage"] = nullptr;
  return out;
}

Json ReplyWriter::ToolCalls(const std::vector<AnswerToolCall>& calls, bool with_index) {
  Json out = Json::array();
  for (const AnswerToolCall& call : calls) {
    Json one;
    if (with_index) one["index"] = call.index;
    one["id"] = call.id;
    one["type"] = "function";
    one["function"] = Json{{"name", call.name}, {"arguments", call.arguments}};
    out.push_back(std::move(one));
  }
  return out;
}

namespace {

Json Choice(Json content, const char* key, Json logprobs) {
  Json c;
  c["index"] = 0;
  c[key] = std::move(content);
  c["logprobs"] = std::move(logprobs);
  c["finish_reason"] = nullptr;
  return c;
}

}  // namespace

std::string ReplyWriter::Frame::Around(const std::string& text) const {
  return before + Dump(text) + after;
}

std::string ReplyWriter::TextChunk(const std::string& text) {
  const auto whole = [this](std::string_view content) {
    return options_.chat ? Dump(Chunk(Choice(Json{{"content", content}}, "delta", Json())))
                         : Dump(Chunk(Choice(content, "text", Json())));
  };
  if (!text_frame_.known()) {
    // Where two chunks begin to differ their texts begin.
    const std::string a = whole("a"), b = whole("b");
    const auto at =
        static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
    text_frame_ = {a.substr(0, at - 1), a.substr(at + 2)};  // without the quotes
  }
  return text_frame_.Around(text);
}

std::vector<std::string> ReplyWriter::Chunks(AnswerEvent event) {
  std::vector<std::string> out;
  const auto& choice = Choice;
  if (options_.chat && !role_sent_) {
    role_sent_ = true;
    out.push_back(
        Dump(Chunk(choice(Json{{"role", "assistant"}, {"content", ""}}, "delta", Json()))));
  }
  if (options_.logprobs) logprobs_.Add(event);
  if (!options_.logprobs && event.reasoning.empty() && event.tool_calls.empty()) {
    if (!event.text.empty()) out.push_back(TextChunk(event.text));
    return out;
  }
  if (!options_.chat) {
    Json logprobs = logprobs_.Take();
    if (event.text.empty() && logprobs.is_null()) return out;
    out.push_back(Dump(Chunk(choice(std::move(event.text), "text", std::move(logprobs)))));
    return out;
  }
  Json delta = Json::object();
  if (!event.reasoning.empty()) delta["reasoning_content"] = std::move(event.reasoning);
  if (!event.text.empty()) delta["content"] = std::move(event.text);
  if (!event.tool_calls.empty()) delta["tool_calls"] = ToolCalls(event.tool_calls, true);
  Json logprobs = logprobs_.Take();
  if (delta.empty() && logprobs.is_null()) return out;
  out.push_back(Dump(Chunk(choice(std::move(delta), "delta", std::move(logprobs)))));
  return out;
}

std::vector<std::string> ReplyWriter::LastChunks(const AnswerEnd& end) {
  std::vector<std::string> out = Chunks({});  // the role, if nothing was said
  Json choice;
  choice["index"] = 0;
  if (options_.chat) {
    choice["delta"] = Json::object();
  } else {
    choice["text"] = "";
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = FinishReasonName(end.reason);
  Json last = Chunk(std::move(choice));
  if (end.session_tokens > 0) last["session_tokens"] = end.session_tokens;
  out.push_back(Dump(last));
  if (options_.include_usage) {
    Json usage = Chunk(Json());
    usage["usage"] = UsageJson(end.usage);
    out.push_back(Dump(usage));
  }
  return out;
}

void ReplyWriter::Collect(AnswerEvent event) {
  if (options_.logprobs) logprobs_.Add(event);
  all_.text += event.text;
  all_.reasoning += event.reasoning;
  for (AnswerToolCall& call : event.tool_calls) all_.tool_calls.push_back(std::move(call));
}

std::string ReplyWriter::Whole(const AnswerEnd& end) {
  Json choice;
  choice["index"] = 0;
  if (options_.chat) {
    Json message;
    message["role"] = "assistant";
    const bool only_calls = all_.text.empty() && !all_.tool_calls.empty();
    message["content"] = only_calls ? Json() : Json(all_.text);
    if (!all_.reasoning.empty()) message["reasoning_content"] = all_.reasoning;
    if (!all_.tool_calls.empty()) message["tool_calls"] = ToolCalls(all_.tool_calls, false);
    choice["message"] = std::move(message);
  } else {
    choice["text"] = all_.text;
  }
  choice["logprobs"] = logprobs_.Take();
  choice["finish_reason"] = FinishReasonName(end.reason);
  Json out = Head(options_.chat ? "chat.completion" : "text_completion");
  out["choices"] = Json::array({std::move(choice)});
  out["usage"] = UsageJson(end.usage);
  if (end.session_tokens > 0) out["session_tokens"] = end.session_tokens;
  return Dump(out);
}

}  // namespace deltamesh
