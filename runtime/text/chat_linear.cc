// Kimi-Linear's chat format: each message is marker, name or role, middle, content, end.
#include "runtime/text/chat_formats.h"

namespace deltamesh {
namespace {

constexpr std::string_view kMarkers[] = {"<|im_end|>",          "<|im_user|>",
                                         "<|im_assistant|>",    "<|im_system|>",
                                         "<|im_middle|>",       "<|tool_calls_section_begin|>",
                                         "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
                                         "<|tool_call_end|>",   "<|tool_calls_section_end|>"};

// What this family cannot express is refused rather than ignored.
absl::Status CheckFeatures(const ChatRequest& request) {
  if (request.thinking.value_or(false)) {
    return InvalidArgument(
        "thinking: this model has no thinking block; leave it out or set it to false");
  }
  if (!request.effort.empty()) {
    return InvalidArgument("%s: this model has no thinking effort; leave it out",
                           request.effort_field);
  }
  if (request.tool_choice == "required") {
    return InvalidArgument(
        "tool_choice: \"required\" is not supported by this model; use auto or none");
  }
  if (ResponseKind(request.response_format) != "text") {
    return InvalidArgument("response_format: \"%s\" is not supported by this model; use text",
                           ResponseKind(request.response_format));
  }
  return absl::OkStatus();
}

absl::Status AppendCalls(const Json& calls, size_t message, SegmentList& out) {
  out.Special("<|tool_calls_section_begin|>");
  for (size_t i = 0; i < calls.size(); ++i) {
    const Json& call = calls[i];
    const auto id = call.find("id");
    if (id == call.end() || !id->is_string() || id->get_ref<const std::string&>().empty()) {
      return InvalidArgument(
          "messages[%d].tool_calls[%d].id: missing or empty; use the id of the call, "
          "functions.NAME:N",
          message, i);
    }
    const Json& function = FunctionOf(call);
    const auto it = function.find("arguments");
    std::string arguments;
    if (it == function.end() || it->is_null()) {
      arguments = "{}";
    } else {
      arguments = it->is_string() ? it->get<std::string>() : PythonJson(*it);
    }
    out.Special("<|tool_call_begin|>");
    out.Text(id->get<std::string>());
    out.Special("<|tool_call_argument_begin|>");
    out.Text(arguments);
    out.Special("<|tool_call_end|>");
  }
  out.Special("<|tool_calls_section_end|>");
  return absl::OkStatus();
}

absl::Status AppendMessage(const ChatMessage& m, size_t index, SegmentList& out) {
  out.Special(m.role == "user"        ? "<|im_user|>"
              : m.role == "assistant" ? "<|im_assistant|>"
                                      : "<|im_system|>");
  out.Text(m.name.empty() ? m.role : m.name);
  out.Special("<|im_middle|>");
  if (m.role == "tool") {
    if (m.tool_call_id.empty()) {
      return InvalidArgument(
          "messages[%d].tool_call_id: missing; give the id of the call it answers", index);
    }
    out.Text("## Return of " + m.tool_call_id + "\n" + m.content);
  } else {
    out.Text(m.content);
  }
  if (!m.tool_calls.empty()) RETURN_IF_ERROR(AppendCalls(m.tool_calls, index, out));
  out.Special("<|im_end|>");
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Segment>> Conversation(const ChatRequest& request, SegmentList out) {
  for (size_t i = 0; i < request.messages.size(); ++i) {
    if (!request.messages[i].tools.empty()) {
      return InvalidArgument(
          "messages[%d].tools: this model cannot be given tools later; use the request's tools", i);
    }
    RETURN_IF_ERROR(AppendMessage(request.messages[i], i, out));
  }
  if (request.add_generation_prompt) {
    out.Special("<|im_assistant|>");
    out.Text("assistant");
    out.Special("<|im_middle|>");
  }
  return out.Take();
}

LinearTurnTokens TurnTokens(const Tokenizer& tokenizer) {
  const auto id = [&](std::string_view name) { return *tokenizer.SpecialId(name); };
  return {.user = id("<|im_user|>"),
          .assistant = id("<|im_assistant|>"),
          .system = id("<|im_system|>"),
          .middle = id("<|im_middle|>"),
          .end = id("<|im_end|>"),
          .section_begin = id("<|tool_calls_section_begin|>"),
          .section_end = id("<|tool_calls_section_end|>"),
          .call_begin = id("<|tool_call_begin|>"),
          .call_end = id("<|tool_call_end|>")};
}

class LinearChatFormat final : public ChatFormat {
 public:
  explicit LinearChatFormat(const Tokenizer& tokenizer)
      : tokenizer_(tokenizer), mark_(TurnTokens(tokenizer)) {}

  std::string_view family() const override { return "kimi_linear"; }

  absl::StatusOr<std::vector<Segment>> Render(const ChatRequest& request) const override {
    RETURN_IF_ERROR(ValidateChat(request));
    RETURN_IF_ERROR(CheckFeatures(request));
    SegmentList out;
    // With tool_choice "none" the model is not shown the tools, so that it calls none.
    if (!request.tools.empty() && request.tool_choice != "none") {
      out.Special("<|im_system|>");
      out.Text("tool_declare");
      out.Special("<|im_middle|>");
      out.Text(CompactJson(request.tools));
      out.Special("<|im_end|>");
    }
    return Conversation(request, std::move(out));
  }

  absl::StatusOr<std::vector<Segment>> RenderMore(const ChatRequest& request) const override {
    RETURN_IF_ERROR(ValidateChat(request));
    RETURN_IF_ERROR(CheckFeatures(request));
    RETURN_IF_ERROR(CheckMore(request));
    return Conversation(request, SegmentList());
  }

  OpenTurn FindOpenTurn(std::span<const TokenId> conversation) const override {
    return FindLinearOpenTurn(tokenizer_, mark_, conversation);
  }

  std::unique_ptr<AnswerParser> NewParser(const ChatRequest&) const override {
    auto parser = NewLinearAnswerParser(tokenizer_);
    CHECK_OK(parser.status());  // its tokens were checked at load
    return *std::move(parser);
  }

 private:
  const Tokenizer& tokenizer_;
  const LinearTurnTokens mark_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<const ChatFormat>> LoadLinearChatFormat(const Tokenizer& tokenizer) {
  for (const std::string_view name : kMarkers) {
    RETURN_IF_ERROR(NeedSpecial(tokenizer, name).status());
  }
  return std::make_unique<LinearChatFormat>(tokenizer);
}

}  // namespace deltamesh
