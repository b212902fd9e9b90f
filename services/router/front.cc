#include "services/router/front.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "runtime/base/checkpoint_marks.h"
#include "runtime/base/status.h"
#include "runtime/text/utf8.h"
#include "services/router/cache_hints.h"

namespace deltamesh {
namespace {

constexpr size_t kRequestIdBytesMax = 128;
constexpr std::string_view kAffinityPrefix = "affinity\n";  // of a name that is not a session's

// With as many digits as tell the value apart from its neighbours; most values here were float32.
std::string Exact(double value) {
  char digits[40];
  const auto narrow = static_cast<float>(value);
  const std::to_chars_result end = static_cast<double>(narrow) == value
                                       ? std::to_chars(digits, std::end(digits), narrow)
                                       : std::to_chars(digits, std::end(digits), value);
  return std::string(digits, end.ptr);
}

absl::Status CheckRange(const char* field, double value, double low, double high) {
  if (std::isfinite(value) && value >= low && value <= high) return absl::OkStatus();
  return InvalidArgument("%s: %s is out of range; use %g to %g", field, Exact(value), low, high);
}

absl::Status CheckRequestId(const std::string& id) {
  if (id.size() > kRequestIdBytesMax) {
    return InvalidArgument("request_id: %d characters; use at most %d", id.size(),
                           kRequestIdBytesMax);
  }
  const bool printable =
      std::all_of(id.begin(), id.end(), [](unsigned char c) { return c > 0x20 && c < 0x7F; });
  if (!printable) {
    return InvalidArgument(
        "request_id: holds a blank or unprintable character; use printable ASCII");
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> JsonField(const std::string& text, const std::string& field, bool array) {
  if (text.empty()) return Json();
  ASSIGN_OR_RETURN(Json value, ParseJson(text, field));
  if (array ? !value.is_array() : !value.is_object()) {
    return InvalidArgument("%s: is not a JSON %s; send one, or leave the field empty", field,
                           array ? "array" : "object");
  }
  return value;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Front>> Front::Load(FrontOptions options, Entropy* entropy) {
  if (options.model_name.empty()) {
    const auto folder = std::filesystem::absolute(options.model).lexically_normal();
    options.model_name =
        (folder.has_filename() ? folder : folder.parent_path()).filename().string();
  }
  std::unique_ptr<Front> front(new Front(std::move(options), entropy));
  ASSIGN_OR_RETURN(front->tokenizer_, Tokenizer::Load(front->options_.model));
  ASSIGN_OR_RETURN(front->chat_, ChatFormat::Load(front->options_.model, *front->tokenizer_));
  for (TokenId id = 0; id < front->tokenizer_->vocab_size(); ++id) {
    front->token_bytes_max_ = std::max(
        front->token_bytes_max_, static_cast<int64_t>(front->tokenizer_->TokenBytes(id).size()));
  }
  front->info_.set_name(front->options_.model_name);
  front->info_.set_family(std::string(front->chat_->family()));
  front->info_.set_vocab_size(static_cast<uint32_t>(front->tokenizer_->vocab_size()));
  front->info_.set_random_weights(HasRandomWeights(front->options_.model.string()));
  return front;
}

absl::Status Front::CheckModel(const std::string& model) const {
  if (model.empty() || model == options_.model_name) return absl::OkStatus();
  return NotFound("model: \"%s\" is not served here; use \"%s\"", model.substr(0, 200),
                  options_.model_name);
}

absl::Status Front::CheckTokens(const char* field, const std::vector<TokenId>& ids) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= tokenizer_->vocab_size()) {
      return InvalidArgument("%s[%d]: token %d is outside the vocabulary; use 0 to %d", field, i,
                             ids[i], tokenizer_->vocab_size() - 1);
    }
  }
  return absl::OkStatus();
}

int64_t Front::TextBytesMax(int64_t context_tokens) const {
  if (context_tokens <= 0 || context_tokens > options_.text_bytes_max / token_bytes_max_) {
    return options_.text_bytes_max;
  }
  return context_tokens * token_bytes_max_;
}

absl::Status Front::CheckSize(const PromptInput& input, int64_t context_tokens) const {
  const char* field = "prompt";
  int64_t bytes = 0;
  if (const auto* text = std::get_if<std::string>(&input)) {
    bytes = static_cast<int64_t>(text->size());
  } else if (const auto* chat = std::get_if<ChatRequest>(&input)) {
    field = "messages";
    for (const ChatMessage& m : chat->messages) bytes += static_cast<int64_t>(m.content.size());
  }
  const int64_t most = TextBytesMax(context_tokens);
  if (bytes <= most) return absl::OkStatus();
  return InvalidArgument(
      "%s: %d bytes of text; a context of %d tokens holds at most %d; shorten it", field, bytes,
      context_tokens, most);
}

absl::StatusOr<std::vector<TokenId>> Front::Tokenize(const std::string& model, PromptInput&& input,
                                                     bool more) const {
  RETURN_IF_ERROR(CheckModel(model));
  const auto check_bytes = [this](const char* field, size_t bytes) {
    if (static_cast<int64_t>(bytes) <= options_.text_bytes_max) return absl::OkStatus();
    return InvalidArgument("%s: %d bytes of text; use at most %d", field, bytes,
                           options_.text_bytes_max);
  };
  if (auto* ids = std::get_if<std::vector<TokenId>>(&input)) {
    if (ids->empty()) return InvalidArgument("prompt: no tokens; send at least one");
    RETURN_IF_ERROR(CheckTokens("prompt", *ids));
    return std::move(*ids);
  }
  if (const auto* text = std::get_if<std::string>(&input)) {
    if (text->empty()) return InvalidArgument("prompt: is empty; send some text");
    RETURN_IF_ERROR(check_bytes("prompt", text->size()));
    absl::StatusOr<std::vector<TokenId>> ids = tokenizer_->EncodeOrdinary(*text);
    return ids.ok() ? std::move(ids) : Annotate(ids.status(), "prompt");
  }
  const auto* chat = std::get_if<ChatRequest>(&input);
  if (chat == nullptr) {
    return InvalidArgument("input: is missing; send messages, text or token ids");
  }
  if (chat->messages.empty())
    return InvalidArgument("messages: is empty; send at least one message");
  ASSIGN_OR_RETURN(const std::vector<Segment> segments,
                   more ? chat_->RenderMore(*chat) : chat_->Render(*chat));
  size_t bytes = 0;
  for (const Segment& s : segments) bytes += s.text.size();
  RETURN_IF_ERROR(check_bytes("messages", bytes));
  absl::StatusOr<std::vector<TokenId>> ids = tokenizer_->EncodeSegments(segments);
  return ids.ok() ? std::move(ids) : Annotate(ids.status(), "messages");
}

absl::StatusOr<mesh::Sampling> Front::CheckSampling(const v1::SamplingOptions& in,
                                                    const std::optional<int64_t>& logprobs) const {
  mesh::Sampling out;
  out.set_temperature(in.has_temperature() ? in.temperature() : 1);
  out.set_top_p(in.has_top_p() ? in.top_p() : 1);
  out.set_top_k(in.has_top_k() ? in.top_k() : 0);
  out.set_min_p(in.has_min_p() ? in.min_p() : 0);
  out.set_repetition_penalty(in.has_repetition_penalty() ? in.repetition_penalty() : 1);
  out.set_presence_penalty(in.has_presence_penalty() ? in.presence_penalty() : 0);
  out.set_frequency_penalty(in.has_frequency_penalty() ? in.frequency_penalty() : 0);
  RETURN_IF_ERROR(CheckRange("temperature", out.temperature(), 0, 2));
  if (!(out.top_p() > 0 && out.top_p() <= 1)) {
    return InvalidArgument("top_p: %s is out of range; use more than 0, up to 1",
                           Exact(out.top_p()));
  }
  RETURN_IF_ERROR(CheckRange("min_p", out.min_p(), 0, 1));
  RETURN_IF_ERROR(CheckRange("presence_penalty", out.presence_penalty(), -2, 2));
  RETURN_IF_ERROR(CheckRange("frequency_penalty", out.frequency_penalty(), -2, 2));
  if (!std::isfinite(out.repetition_penalty()) || out.repetition_penalty() <= 0) {
    return InvalidArgument("repetition_penalty: %s; use a number above 0, 1 for none",
                           Exact(out.repetition_penalty()));
  }
  if (out.top_k() > static_cast<uint32_t>(std::numeric_limits<int32_t>::max())) {
    return InvalidArgument("top_k: %d is too large; use 0 for no limit", out.top_k());
  }
  if (in.logit_bias_size() > options_.logit_bias_max) {
    return InvalidArgument("logit_bias: %d entries; use at most %d", in.logit_bias_size(),
                           options_.logit_bias_max);
  }
  for (const auto& [token, bias] : in.logit_bias()) {
    if (token < 0 || token >= tokenizer_->vocab_size()) {
      return InvalidArgument("logit_bias: token %d is outside the vocabulary; use 0 to %d", token,
                             tokenizer_->vocab_size() - 1);
    }
    RETURN_IF_ERROR(CheckRange("logit_bias", bias, -100, 100));
    (*out.mutable_logit_bias())[token] = bias;
  }
  if (logprobs) {
    RETURN_IF_ERROR(CheckRange("logprobs", static_cast<double>(*logprobs), 0,
                               static_cast<double>(options_.logprobs_max)));
  }
  out.set_logprobs(static_cast<int32_t>(logprobs.value_or(-1)));
  out.set_seed(in.has_seed() ? in.seed() : entropy_->Next());
  return out;
}

absl::Status Front::CheckAppend(const GenerateSpec& spec) {
  if (!spec.append) {
    if (spec.session_tokens == 0) return absl::OkStatus();
    return InvalidArgument(
        "session_tokens: %d without append_to_session; leave it out, or append to the session",
        spec.session_tokens);
  }
  if (spec.cache.session().empty()) {
    return InvalidArgument("append_to_session: without cache.session; name the session there");
  }
  if (spec.cache.off()) {
    return InvalidArgument(
        "append_to_session: with cache.off, which keeps no session; leave one of them out");
  }
  return absl::OkStatus();
}

absl::StatusOr<SessionId> Front::NameSession(const char* field, const std::string& session,
                                             const std::string& salt) {
  if (session.empty()) return InvalidArgument("%s: is empty; name a session", field);
  v1::CacheOptions names;
  names.set_session(session);
  names.set_salt(salt);
  const absl::StatusOr<mesh::CacheHints> checked = MakeCacheHints(names);
  if (!checked.ok()) return Annotate(checked.status(), field);
  return MakeSessionId(salt, session);
}

absl::Status PreparedRequest::Join(const std::vector<TokenId>& session) {
  if (append->session_tokens != 0 &&
      append->session_tokens != static_cast<int64_t>(session.size())) {
    return FailedPrecondition(
        "session_tokens: %d, but session \"%s\" has %d: another turn of it ended meanwhile; see "
        "what it "
        "said, then append with %d, or leave the field out to append to whatever there is",
        append->session_tokens, append->name, session.size(), session.size());
  }
  std::vector<TokenId> prompt = session;
  if (append->chat != nullptr) {
    const OpenTurn turn = append->chat->FindOpenTurn(session);
    ASSIGN_OR_RETURN(const std::vector<TokenId> closing,
                     append->tokenizer->EncodeSegments(turn.closing));
    prompt.resize(turn.keep);
    prompt.insert(prompt.end(), closing.begin(), closing.end());
  }
  prompt.insert(prompt.end(), request.prompt.begin(), request.prompt.end());
  request.prompt = std::move(prompt);
  request.append = true;
  return absl::OkStatus();
}

// A client's name alone would not do: it may be in use still, here or, since routers share workers, at
// another router.
RequestId Front::MakeRequestId(const std::string& client_id) const {
  const std::string drawn = absl::StrFormat("%016x%016x", entropy_->Next(), entropy_->Next());
  return client_id.empty() || !CheckRequestId(client_id).ok() ? drawn : client_id + "/" + drawn;
}

TraceContext Front::StartTrace(std::string_view traceparent) const {
  TraceContext trace = ParseTraceParent(traceparent);
  if (!trace.empty()) trace.span_id = SpanId(entropy_->Next());
  return trace;
}

absl::StatusOr<PreparedRequest> Front::Prepare(GenerateSpec spec) const {
  RETURN_IF_ERROR(CheckModel(spec.model));
  RETURN_IF_ERROR(CheckRequestId(spec.request_id));
  PreparedRequest out;
  ClientRequest& request = out.request;
  ASSIGN_OR_RETURN(request.sampling, CheckSampling(spec.sampling, spec.logprobs));
  if (spec.max_tokens < 0 || spec.max_tokens > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("max_tokens: %d is out of range; use 1 to %d, or 0 for what fits",
                           spec.max_tokens, std::numeric_limits<int32_t>::max());
  }
  if (static_cast<int64_t>(spec.stop_token_ids.size()) > options_.stop_token_ids_max) {
    return InvalidArgument("stop_token_ids: %d entries; use at most %d", spec.stop_token_ids.size(),
                           options_.stop_token_ids_max);
  }
  RETURN_IF_ERROR(CheckTokens("stop_token_ids", spec.stop_token_ids));
  const auto* chat = std::get_if<ChatRequest>(&spec.input);
  ASSIGN_OR_RETURN(out.answer, AnswerStream::Create(
                                   *tokenizer_, chat != nullptr ? chat_->NewParser(*chat) : nullptr,
                                   std::move(spec.stop), request.sampling.seed()));
  ASSIGN_OR_RETURN(request.cache, MakeCacheHints(spec.cache));
  const auto places = static_cast<int64_t>(spec.marks.size()) + spec.cache.breakpoints_size();
  if (places > kCacheBreakpointsMax) {
    return InvalidArgument("cache_control: %d places are marked; mark at most %d", places,
                           kCacheBreakpointsMax);
  }
  if (!spec.cache.session().empty() && spec.affinity_only) {
    request.cache.set_session(SessionNumber(
        MakeSessionId(spec.cache.salt(), std::string(kAffinityPrefix) + spec.cache.session())));
  } else if (!spec.cache.session().empty() && !spec.cache.off()) {
    request.session = MakeSessionId(spec.cache.salt(), spec.cache.session());
  }
  RETURN_IF_ERROR(CheckAppend(spec));
  if (spec.append) {
    out.append = Append{.name = spec.cache.session(),
                        .session_tokens = spec.session_tokens,
                        .chat = chat != nullptr ? chat_.get() : nullptr,
                        .tokenizer = tokenizer_.get()};
  }
  // Last, because it is the expensive part.
  ASSIGN_OR_RETURN(request.prompt, Tokenize(spec.model, std::move(spec.input), spec.append));
  if (chat != nullptr && !spec.append && !request.cache.off()) {
    const int64_t tokens = SystemTokens(*chat, request.prompt);
    if (tokens > 0) request.cache.add_breakpoints(static_cast<uint64_t>(tokens));
    for (const int64_t marked : TokensUpTo(std::move(spec.marks), *chat, request.prompt)) {
      if (marked > 0) request.cache.add_breakpoints(static_cast<uint64_t>(marked));
    }
  }
  request.request_id =
      spec.drawn_id.empty() ? MakeRequestId(spec.request_id) : std::move(spec.drawn_id);
  request.trace = std::move(spec.trace);
  out.client_id = spec.request_id.empty() ? request.request_id : std::move(spec.request_id);
  request.max_tokens = spec.max_tokens;
  request.stop_token_ids = std::move(spec.stop_token_ids);
  if (!spec.ignore_eos) {
    const std::vector<TokenId>& eos = tokenizer_->eos_ids();
    request.stop_token_ids.insert(request.stop_token_ids.end(), eos.begin(), eos.end());
  }
  request.deadline = spec.deadline;
  return out;
}

// Leading tokens that a chat with the same tools and system messages but another conversation would have
// too: what its prompt shares with that of the system messages alone.
int64_t Front::SystemTokens(const ChatRequest& chat, const std::vector<TokenId>& prompt) const {
  const auto end = std::find_if(chat.messages.begin(), chat.messages.end(),
                                [](const ChatMessage& m) { return m.role != "system"; });
  if (end == chat.messages.end() || (end == chat.messages.begin() && chat.tools.empty())) return 0;
  ChatRequest system = chat;
  system.messages.assign(chat.messages.begin(), end);
  system.messages.push_back({.role = "user"});
  return SharedTokens(system, prompt);
}

std::vector<int64_t> Front::TokensUpTo(std::vector<ChatMark> marks, const ChatRequest& chat,
                                       const std::vector<TokenId>& prompt) const {
  std::erase_if(marks, [&](const ChatMark& m) { return m.message >= chat.messages.size(); });
  if (marks.empty()) return {};
  std::sort(marks.begin(), marks.end(), [](const ChatMark& a, const ChatMark& b) {
    return std::pair(a.message, a.bytes) > std::pair(b.message, b.bytes);
  });
  std::vector<int64_t> tokens;
  ChatRequest begin = chat;  // once: it only becomes shorter
  begin.add_generation_prompt = false;
  for (const ChatMark& mark : marks) {
    begin.messages.resize(mark.message + 1);
    std::string& content = begin.messages.back().content;
    if (mark.bytes < content.size()) content.resize(mark.bytes);
    tokens.push_back(SharedTokens(begin, prompt));
  }
  std::reverse(tokens.begin(), tokens.end());
  return tokens;
}

int64_t Front::SharedTokens(const ChatRequest& other, const std::vector<TokenId>& prompt) const {
  const absl::StatusOr<std::vector<Segment>> segments = chat_->Render(other);
  if (!segments.ok()) return 0;
  std::string text;
  for (const Segment& segment : *segments) text += segment.text;
  // By their bytes: to tokenise it again would cost as much as it did in the prompt.
  std::string_view rest = text;
  int64_t tokens = 0;
  for (const TokenId id : prompt) {
    const std::string_view bytes = tokenizer_->TokenBytes(id);
    if (!rest.starts_with(bytes)) break;
    rest.remove_prefix(bytes.size());
    ++tokens;
  }
  return tokens;
}

absl::StatusOr<ChatRequest> ChatFromProto(const v1::ChatInput& chat) {
  ChatRequest out;
  RETURN_IF_ERROR(CheckMessageCount(chat.messages_size()));
  ASSIGN_OR_RETURN(out.tools, JsonField(chat.tools_json(), "tools_json", true));
  ASSIGN_OR_RETURN(out.response_format,
                   JsonField(chat.response_format_json(), "response_format_json", false));
  if (chat.has_thinking()) out.thinking = chat.thinking();
  out.effort = chat.thinking_effort();
  out.effort_field = "thinking_effort";
  out.tool_choice = chat.tool_choice();
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& in = chat.messages(i);
    const std::string where = absl::StrFormat("messages[%d].", i);
    ChatMessage m;
    m.role = in.role();
    m.content = in.content();
    m.name = in.name();
    m.reasoning_content = in.reasoning_content();
    m.tool_call_id = in.tool_call_id();
    ASSIGN_OR_RETURN(m.tool_calls,
                     JsonField(in.tool_calls_json(), where + "tool_calls_json", true));
    ASSIGN_OR_RETURN(m.tools, JsonField(in.tools_json(), where + "tools_json", true));
    out.messages.push_back(std::move(m));
  }
  return out;
}

}  // namespace deltamesh
