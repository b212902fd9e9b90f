#include "services/router/openai_request.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "runtime/base/status.h"
#include "services/router/cache_hints.h"

namespace deltamesh {
namespace {

constexpr double kExactMax =
    9007199254740991.0;  // 2^53 - 1: each whole number up to it is a double

// Typed access to the fields of one object. Absent and null leave the output as it is.
class Fields {
 public:
  explicit Fields(const Json& object, std::string prefix = "")
      : object_(object), prefix_(std::move(prefix)) {}

  // Null when absent.
  const Json* Find(const char* name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  absl::Status Wrong(const char* name, const Json& value, const char* use) const {
    return InvalidArgument("%s%s: is %s; use %s", prefix_, name, Kind(value), use);
  }

  absl::Status Get(const char* name, bool* out) const {
    const Json* v = Find(name);
    if (v == nullptr) return absl::OkStatus();
    if (!v->is_boolean()) return Wrong(name, *v, "true or false");
    *out = v->get<bool>();
    return absl::OkStatus();
  }
  absl::Status Get(const char* name, std::string* out) const {
    const Json* v = Find(name);
    if (v == nullptr) return absl::OkStatus();
    if (!v->is_string()) return Wrong(name, *v, "a string");
    *out = v->get<std::string>();
    return absl::OkStatus();
  }
  absl::Status Get(const char* name, std::optional<double>* out) const {
    const Json* v = Find(name);
    if (v == nullptr) return absl::OkStatus();
    if (!v->is_number()) return Wrong(name, *v, "a number");
    const double value = v->get<double>();
    if (std::abs(value) > std::numeric_limits<float>::max()) {
      return Wrong(name, *v, "a smaller number");
    }
    *out = value;
    return absl::OkStatus();
  }
  absl::Status Get(const char* name, std::optional<int64_t>* out) const {
    const Json* v = Find(name);
    if (v == nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(*out, Integer(prefix_ + name, *v));
    return absl::OkStatus();
  }

  // The one rule for integers: a number without a fraction, written as 5, 5.0 or 5e0. Of those with a
  // point or an exponent only what a double holds exactly is taken, so none is silently rounded.
  static absl::StatusOr<int64_t> Integer(const std::string& field, const Json& v) {
    if (v.is_number_unsigned() && v.get<uint64_t>() > std::numeric_limits<int64_t>::max()) {
      return InvalidArgument("%s: %s is too large", field, v.dump());
    }
    if (v.is_number_integer()) return v.get<int64_t>();
    if (v.is_number_float()) {
      const double value = v.get<double>();
      if (std::nearbyint(value) == value && std::abs(value) <= kExactMax) {
        return static_cast<int64_t>(value);
      }
    }
    return InvalidArgument("%s: is %s; use a whole number", field, Kind(v));
  }

  // The same for what takes all 64 bits: -1 is the largest value.
  static absl::StatusOr<uint64_t> Bits(const std::string& field, const Json& v) {
    if (v.is_number_unsigned()) return v.get<uint64_t>();
    ASSIGN_OR_RETURN(const int64_t value, Integer(field, v));
    return static_cast<uint64_t>(value);
  }

  static std::string Kind(const Json& v) {
    // All digits: a rounded number may look like a right one.
    if (v.is_number()) return "the number " + v.dump();
    if (v.is_null()) return "null";
    return std::string(v.is_array() || v.is_object() ? "an " : "a ") + v.type_name();
  }

 private:
  const Json& object_;
  const std::string prefix_;
};

absl::Status ReadLogitBias(const Json& bias, v1::SamplingOptions* out) {
  if (!bias.is_object()) {
    return InvalidArgument("logit_bias: is %s; use an object of token id to bias",
                           Fields::Kind(bias));
  }
  for (const auto& [key, value] : bias.items()) {
    int64_t token = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (error != std::errc() || end != key.data() + key.size() || token < 0 ||
        token > std::numeric_limits<int32_t>::max()) {
      return InvalidArgument(
          "logit_bias: \"%s\" is not a token id; use whole numbers from 0, below the vocabulary "
          "size",
          key.substr(0, 40));
    }
    if (!value.is_number()) {
      return InvalidArgument("logit_bias: the bias of token %d is %s; use a number", token,
                             Fields::Kind(value));
    }
    (*out->mutable_logit_bias())[static_cast<int32_t>(token)] = value.get<float>();
  }
  return absl::OkStatus();
}

absl::Status ReadSampling(const Fields& fields, v1::SamplingOptions* out) {
  std::optional<double> temperature, top_p, min_p, repetition, presence, frequency;
  std::optional<int64_t> top_k;
  RETURN_IF_ERROR(fields.Get("temperature", &temperature));
  RETURN_IF_ERROR(fields.Get("top_p", &top_p));
  RETURN_IF_ERROR(fields.Get("top_k", &top_k));
  RETURN_IF_ERROR(fields.Get("min_p", &min_p));
  RETURN_IF_ERROR(fields.Get("repetition_penalty", &repetition));
  RETURN_IF_ERROR(fields.Get("presence_penalty", &presence));
  RETURN_IF_ERROR(fields.Get("frequency_penalty", &frequency));
  if (temperature) out->set_temperature(static_cast<float>(*temperature));
  if (top_p) out->set_top_p(static_cast<float>(*top_p));
  if (min_p) out->set_min_p(static_cast<float>(*min_p));
  if (repetition) out->set_repetition_penalty(static_cast<float>(*repetition));
  if (presence) out->set_presence_penalty(static_cast<float>(*presence));
  if (frequency) out->set_frequency_penalty(static_cast<float>(*frequency));
  if (top_k) {
    if (*top_k < -1 || *top_k > std::numeric_limits<int32_t>::max()) {
      return InvalidArgument("top_k: %d is out of range; use 1 to %d, or 0 or -1 for no limit",
                             *top_k, std::numeric_limits<int32_t>::max());
    }
    out->set_top_k(static_cast<uint32_t>(std::max<int64_t>(*top_k, 0)));
  }
  if (const Json* v = fields.Find("seed")) {
    ASSIGN_OR_RETURN(const uint64_t seed, Fields::Bits("seed", *v));
    out->set_seed(seed);
  }
  if (const Json* bias = fields.Find("logit_bias")) RETURN_IF_ERROR(ReadLogitBias(*bias, out));
  return absl::OkStatus();
}

// Token ids of any size, named as they were given when no vocabulary can have them.
absl::StatusOr<TokenId> TokenOf(const std::string& field, const Json& value) {
  ASSIGN_OR_RETURN(const int64_t id, Fields::Integer(field, value));
  if (id >= 0 && id <= std::numeric_limits<TokenId>::max()) return static_cast<TokenId>(id);
  return InvalidArgument(
      "%s: %d is not a token id; use whole numbers from 0, below the vocabulary size", field, id);
}

absl::Status ReadStop(const Fields& fields, GenerateSpec* spec) {
  if (const Json* stop = fields.Find("stop")) {
    if (stop->is_string()) {
      spec->stop.push_back(stop->get<std::string>());
    } else if (stop->is_array()) {
      for (size_t i = 0; i < stop->size(); ++i) {
        if (!(*stop)[i].is_string()) {
          return InvalidArgument("stop[%d]: is %s; use a string", i, Fields::Kind((*stop)[i]));
        }
        spec->stop.push_back((*stop)[i].get<std::string>());
      }
    } else {
      return fields.Wrong("stop", *stop, "a string or a list of strings");
    }
  }
  if (const Json* ids = fields.Find("stop_token_ids")) {
    if (!ids->is_array()) return fields.Wrong("stop_token_ids", *ids, "a list of token ids");
    for (size_t i = 0; i < ids->size(); ++i) {
      ASSIGN_OR_RETURN(const TokenId id,
                       TokenOf(absl::StrFormat("stop_token_ids[%d]", i), (*ids)[i]));
      spec->stop_token_ids.push_back(id);
    }
  }
  return fields.Get("ignore_eos", &spec->ignore_eos);
}

// A length that was given must allow at least one token.
absl::Status ReadMaxTokens(const Fields& fields, const char* name, int64_t* out) {
  std::optional<int64_t> value;
  RETURN_IF_ERROR(fields.Get(name, &value));
  if (!value) return absl::OkStatus();
  if (*value < 1 || *value > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("%s: %d is out of range; use 1 to %d", name, *value,
                           std::numeric_limits<int32_t>::max());
  }
  *out = *value;
  return absl::OkStatus();
}

absl::Status OnlyOne(const Fields& fields, const char* name) {
  std::optional<int64_t> value;
  RETURN_IF_ERROR(fields.Get(name, &value));
  if (!value || *value == 1) return absl::OkStatus();
  return InvalidArgument("%s: %d is not served; use 1 and send one request per answer", name,
                         *value);
}

absl::Status ReadBreakpoints(const Fields& fields, v1::CacheOptions* out) {
  const Json* at = fields.Find("cache_breakpoints");
  if (at == nullptr) return absl::OkStatus();
  if (!at->is_array()) return fields.Wrong("cache_breakpoints", *at, "a list of token counts");
  for (size_t i = 0; i < at->size(); ++i) {
    const std::string field = absl::StrFormat("cache_breakpoints[%d]", i);
    ASSIGN_OR_RETURN(const int64_t tokens, Fields::Integer(field, (*at)[i]));
    if (tokens < 1) return InvalidArgument("%s: %d; use 1 or more tokens", field, tokens);
    out->add_breakpoints(static_cast<uint64_t>(tokens));
  }
  return absl::OkStatus();
}

// Whether the message, or the part of one, is marked as the end of what others share.
absl::StatusOr<bool> ReadMark(const Json& object, const std::string& prefix) {
  const Fields fields(object, prefix);
  const Json* control = fields.Find("cache_control");
  if (control == nullptr) return false;
  std::string type;
  if (!control->is_object()) {
    return fields.Wrong("cache_control", *control, "{\"type\": \"ephemeral\"}");
  }
  RETURN_IF_ERROR(Fields(*control, prefix + "cache_control.").Get("type", &type));
  if (type == "ephemeral") return true;
  return InvalidArgument("%scache_control.type: \"%s\" is not known; use \"ephemeral\"", prefix,
                         type.substr(0, 40));
}

// Of messages that were found well-formed.
absl::Status ReadMarks(const Json& messages, std::vector<ChatMark>* out) {
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string prefix = absl::StrFormat("messages[%d].", i);
    const auto content = messages[i].find("content");
    if (content != messages[i].end() && content->is_array()) {
      size_t bytes = 0;
      for (size_t j = 0; j < content->size(); ++j) {
        const Json& part = (*content)[j];
        const auto text = part.find("text");
        if (text != part.end() && text->is_string()) {
          bytes += text->get_ref<const std::string&>().size();
        }
        ASSIGN_OR_RETURN(const bool marked,
                         ReadMark(part, absl::StrFormat("%scontent[%d].", prefix, j)));
        if (marked) out->push_back({.message = i, .bytes = bytes});
      }
    }
    ASSIGN_OR_RETURN(const bool marked, ReadMark(messages[i], prefix));
    if (marked) out->push_back({.message = i});
  }
  return absl::OkStatus();
}

absl::Status ReadCacheOptions(const Fields& fields, v1::CacheOptions* out) {
  RETURN_IF_ERROR(ReadBreakpoints(fields, out));
  for (const auto& [name, text] : {std::pair{"prompt_cache_key", out->mutable_session()},
                                   std::pair{"cache_salt", out->mutable_salt()}}) {
    RETURN_IF_ERROR(fields.Get(name, text));
    if (text->size() > kCacheTextBytesMax) {
      return InvalidArgument("%s: %d bytes; use at most %d", name, text->size(),
                             kCacheTextBytesMax);
    }
  }
  return absl::OkStatus();
}

// A session is named by itself and not by prompt_cache_key, which clients set without meaning one.
absl::Status ReadSession(const Fields& fields, GenerateSpec* spec) {
  std::string name;
  std::optional<int64_t> tokens;
  RETURN_IF_ERROR(fields.Get("session", &name));
  RETURN_IF_ERROR(fields.Get("append_to_session", &spec->append));
  RETURN_IF_ERROR(fields.Get("session_tokens", &tokens));
  const bool named = fields.Find("session") != nullptr;
  if (named && (name.empty() || name.size() > kCacheTextBytesMax)) {
    return InvalidArgument("session: %d bytes; use 1 to %d", name.size(), kCacheTextBytesMax);
  }
  if (spec->append && !named) {
    return InvalidArgument("append_to_session: without session; name the session there");
  }
  if (tokens && (*tokens < 1 || *tokens > std::numeric_limits<int32_t>::max())) {
    return InvalidArgument("session_tokens: %d is out of range; use 1 to %d, or leave it out",
                           *tokens, std::numeric_limits<int32_t>::max());
  }
  spec->session_tokens = tokens.value_or(0);
  spec->affinity_only = !named;
  if (named) spec->cache.set_session(name);
  return absl::OkStatus();
}

// What clients may ask for and would miss in the answer.
absl::Status RefuseWhatIsNotServed(const Fields& fields) {
  std::string user;
  RETURN_IF_ERROR(fields.Get("user", &user));
  for (const char* name :
       {"functions", "function_call", "audio", "prediction", "web_search_options"}) {
    if (fields.Find(name) != nullptr) {
      return InvalidArgument("%s: is not served; leave it out, and declare functions as tools",
                             name);
    }
  }
  const Json* modalities = fields.Find("modalities");
  if (modalities == nullptr || *modalities == Json::array({"text"})) return absl::OkStatus();
  return InvalidArgument("modalities: only [\"text\"] is served; leave it out");
}

absl::Status ReadCommon(const Json& body, OpenAiRequest* out) {
  const Fields fields(body);
  RETURN_IF_ERROR(fields.Get("model", &out->spec.model));
  RETURN_IF_ERROR(fields.Get("stream", &out->stream));
  RETURN_IF_ERROR(OnlyOne(fields, "n"));
  if (const Json* options = fields.Find("stream_options")) {
    if (!options->is_object()) return fields.Wrong("stream_options", *options, "an object");
    if (!out->stream)
      return InvalidArgument("stream_options: is only for streams; set stream to true");
    RETURN_IF_ERROR(Fields(*options, "stream_options.").Get("include_usage", &out->include_usage));
  }
  RETURN_IF_ERROR(ReadMaxTokens(fields, "max_tokens", &out->spec.max_tokens));
  RETURN_IF_ERROR(ReadStop(fields, &out->spec));
  RETURN_IF_ERROR(ReadCacheOptions(fields, &out->spec.cache));
  RETURN_IF_ERROR(ReadSession(fields, &out->spec));
  RETURN_IF_ERROR(RefuseWhatIsNotServed(fields));
  return ReadSampling(fields, &out->spec.sampling);
}

absl::Status ReadThinking(const Fields& fields, ChatRequest* chat) {
  chat->effort_field = "reasoning_effort";
  RETURN_IF_ERROR(fields.Get("reasoning_effort", &chat->effort));
  if (chat->effort == "none" || chat->effort == "minimal") {
    chat->thinking = false;
    chat->effort.clear();
  }
  if (const Json* thinking = fields.Find("thinking")) {
    if (thinking->is_boolean()) {
      chat->thinking = thinking->get<bool>();
    } else if (thinking->is_object()) {
      std::string type;
      RETURN_IF_ERROR(Fields(*thinking, "thinking.").Get("type", &type));
      if (type != "enabled" && type != "disabled") {
        return InvalidArgument(
            "thinking.type: \"%s\" is not known; use \"enabled\" or \"disabled\"",
            type.substr(0, 40));
      }
      chat->thinking = type == "enabled";
    } else {
      return fields.Wrong("thinking", *thinking, "true, false or {\"type\": \"enabled\"}");
    }
  }
  if (const Json* extra = fields.Find("chat_template_kwargs")) {
    if (!extra->is_object()) return fields.Wrong("chat_template_kwargs", *extra, "an object");
    bool value = chat->thinking.value_or(true);
    const Fields inner(*extra, "chat_template_kwargs.");
    for (const char* name : {"thinking", "enable_thinking"}) {
      if (inner.Find(name) == nullptr) continue;
      RETURN_IF_ERROR(inner.Get(name, &value));
      chat->thinking = value;
    }
  }
  return absl::OkStatus();
}

absl::Status ReadTools(const Fields& fields, ChatRequest* chat) {
  if (const Json* tools = fields.Find("tools")) {
    if (!tools->is_array()) return fields.Wrong("tools", *tools, "a list of tool declarations");
    chat->tools = *tools;
  }
  if (const Json* choice = fields.Find("tool_choice")) {
    if (!choice->is_string()) {
      return fields.Wrong("tool_choice", *choice,
                          "\"auto\", \"none\" or \"required\": one named tool cannot be forced");
    }
    chat->tool_choice = choice->get<std::string>();
  }
  if (const Json* format = fields.Find("response_format")) {
    if (!format->is_object())
      return fields.Wrong("response_format", *format, "an object with a type");
    chat->response_format = *format;
  }
  return absl::OkStatus();
}

absl::Status CheckBody(const Json& body) {
  if (body.is_object()) return absl::OkStatus();
  return InvalidArgument("body: is %s; send a JSON object", Fields::Kind(body));
}

// A prompt is text or token ids, alone or as a list of one.
absl::Status ReadPrompt(const Json& prompt, PromptInput* out) {
  if (prompt.is_string()) {
    *out = prompt.get<std::string>();
    return absl::OkStatus();
  }
  if (!prompt.is_array()) {
    return InvalidArgument("prompt: is %s; use a string or a list of token ids",
                           Fields::Kind(prompt));
  }
  const bool nested = !prompt.empty() && (prompt[0].is_string() || prompt[0].is_array());
  if (nested && prompt.size() > 1) {
    return InvalidArgument("prompt: holds %d prompts; send one request for each", prompt.size());
  }
  if (nested) return ReadPrompt(prompt[0], out);
  std::vector<TokenId> ids;
  ids.reserve(prompt.size());
  for (size_t i = 0; i < prompt.size(); ++i) {
    ASSIGN_OR_RETURN(const TokenId id, TokenOf(absl::StrFormat("prompt[%d]", i), prompt[i]));
    ids.push_back(id);
  }
  *out = std::move(ids);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OpenAiRequest> ParseChatCompletion(const Json& body) {
  RETURN_IF_ERROR(CheckBody(body));
  OpenAiRequest out;
  out.chat = true;
  RETURN_IF_ERROR(ReadCommon(body, &out));
  const Fields fields(body);
  RETURN_IF_ERROR(ReadMaxTokens(fields, "max_completion_tokens", &out.spec.max_tokens));
  bool logprobs = false;
  std::optional<int64_t> top;
  RETURN_IF_ERROR(fields.Get("logprobs", &logprobs));
  RETURN_IF_ERROR(fields.Get("top_logprobs", &top));
  if (top && !logprobs) {
    return InvalidArgument("top_logprobs: needs logprobs; set logprobs to true");
  }
  if (top && (*top < 0 || *top > 20)) {
    return InvalidArgument("top_logprobs: %d is out of range; use 0 to 20", *top);
  }
  if (logprobs) out.spec.logprobs = top.value_or(0);

  ChatRequest chat;
  const Json* messages = fields.Find("messages");
  if (messages == nullptr) return InvalidArgument("messages: is missing; send a list of messages");
  ASSIGN_OR_RETURN(chat.messages, ChatMessagesFromJson(*messages));
  for (ChatMessage& m : chat.messages) {
    if (m.role == "developer") m.role = "system";  // the newer name for the same thing
  }
  RETURN_IF_ERROR(ReadMarks(*messages, &out.spec.marks));
  RETURN_IF_ERROR(ReadTools(fields, &chat));
  RETURN_IF_ERROR(ReadThinking(fields, &chat));
  out.spec.input = std::move(chat);
  return out;
}

absl::StatusOr<OpenAiRequest> ParseCompletion(const Json& body) {
  RETURN_IF_ERROR(CheckBody(body));
  OpenAiRequest out;
  out.spec.max_tokens = kCompletionTokensDefault;
  RETURN_IF_ERROR(ReadCommon(body, &out));
  const Fields fields(body);
  RETURN_IF_ERROR(OnlyOne(fields, "best_of"));
  bool echo = false;
  RETURN_IF_ERROR(fields.Get("echo", &echo));
  if (echo) return InvalidArgument("echo: is not served; leave it out");
  std::string suffix;
  RETURN_IF_ERROR(fields.Get("suffix", &suffix));
  if (!suffix.empty()) return InvalidArgument("suffix: is not served; leave it out");
  RETURN_IF_ERROR(fields.Get("logprobs", &out.spec.logprobs));
  const Json* prompt = fields.Find("prompt");
  if (prompt == nullptr) return InvalidArgument("prompt: is missing; send text or token ids");
  RETURN_IF_ERROR(ReadPrompt(*prompt, &out.spec.input));
  return out;
}

}  // namespace deltamesh
