// K3's chat format: nested blocks open(tag, attributes) ... close(tag) out of special tokens, with every
// name, attribute and content encoded on its own.
#include <algorithm>
#include <map>

#include "runtime/text/chat_formats.h"
#include "runtime/text/k3_literals.h"
#include "runtime/text/utf8.h"

namespace deltamesh {
namespace {

constexpr std::string_view kMarkers[] = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"};

using Attribute = std::pair<std::string_view, std::string>;

std::string EscapeAttribute(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out.push_back(c);
    }
  }
  return out;
}

std::string_view KindOf(const Json& value) {
  if (value.is_boolean()) return "boolean";
  if (value.is_null()) return "null";
  if (value.is_number()) return "number";
  if (value.is_string()) return "string";
  return value.is_object() ? "object" : "array";
}

// Python's truth value.
bool Truthy(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return !value.empty();
}

std::string NameOf(const Json& call) { return FunctionOf(call).at("name").get<std::string>(); }

// One prompt being written.
class Writer {
 public:
  Writer(const K3Literals& literals, const ChatRequest& request)
      : literals_(literals), request_(request), thinking_(request.thinking.value_or(true)) {}

  absl::StatusOr<std::vector<Segment>> Write() {
    if (!request_.tools.empty()) {
      RETURN_IF_ERROR(DeclareTools("tools", request_.tools, "tools"));
    }
    if (thinking_) {
      const std::string effort = request_.effort.empty()       ? "max"
                                 : request_.effort == "medium" ? "high"
                                                               : request_.effort;
      ASSIGN_OR_RETURN(const std::string text,
                       literals_.Fill("thinking_effort", effort, "thinking"));
      System("thinking-effort", PythonStrip(text));
    }
    return WriteMore();
  }

  // Without what stands at the beginning.
  absl::StatusOr<std::vector<Segment>> WriteMore() {
    RETURN_IF_ERROR(Conversation());
    RETURN_IF_ERROR(ToolChoice());
    RETURN_IF_ERROR(ResponseFormat());
    if (request_.add_generation_prompt) {
      Open("message", {{"role", "assistant"}});
      Open(thinking_ ? "think" : "response");
    }
    return out_.Take();
  }

 private:
  void Open(std::string_view tag, const std::vector<Attribute>& attributes = {}) {
    out_.Special("<|open|>");
    out_.Text(tag);
    for (const auto& [name, value] : attributes) {
      out_.Text(absl::StrFormat(" %s", name));
      out_.Text("=\"");
      out_.Text(EscapeAttribute(value));
      out_.Text("\"");
    }
    out_.Special("<|sep|>");
  }

  void Close(std::string_view tag) {
    out_.Special("<|close|>");
    out_.Text(tag);
    out_.Special("<|sep|>");
  }

  void EndMessage() {
    Close("message");
    out_.Special("<|end_of_msg|>");
  }

  void Message(std::string_view body, const std::vector<Attribute>& attributes) {
    Open("message", attributes);
    out_.Text(body);
    EndMessage();
  }

  void System(std::string type, std::string_view body) {
    Message(body, {{"role", "system"}, {"type", std::move(type)}});
  }

  absl::Status DeclareTools(std::string_view literal, const Json& tools, const std::string& field) {
    ASSIGN_OR_RETURN(const std::string text,
                     literals_.Fill(literal, SortedCompactJson(tools), field));
    System("tool-declare", text);
    return absl::OkStatus();
  }

  // Of the last assistant message: they may be many, and so may be the results that look for theirs.
  struct Calls {
    const Json* all = nullptr;
    std::map<std::string, size_t> by_id;
  };
  static Calls CallsOf(const ChatMessage& m) {
    Calls calls = {.all = &m.tool_calls, .by_id = {}};
    for (size_t n = 0; n < m.tool_calls.size(); ++n) {
      const auto id = m.tool_calls[n].find("id");
      if (id != m.tool_calls[n].end() && id->is_string()) {
        calls.by_id.emplace(id->get<std::string>(), n);
      }
    }
    return calls;
  }

  absl::Status Conversation() {
    const auto& messages = request_.messages;
    Calls calls;
    for (size_t i = 0; i < messages.size();) {
      const ChatMessage& m = messages[i];
      if (m.role == "tool") {
        size_t end = i;
        while (end < messages.size() && messages[end].role == "tool") ++end;
        RETURN_IF_ERROR(ToolResults(i, end, calls));
        i = end;
        continue;
      }
      if (m.role == "system" && !m.tools.empty()) {
        RETURN_IF_ERROR(
            DeclareTools("tools_dynamic", m.tools, absl::StrFormat("messages[%d].tools", i)));
      } else if (m.role == "assistant") {
        calls = CallsOf(m);
        Assistant(m);
      } else {
        Message(m.content, RoleAttributes(m));
      }
      ++i;
    }
    return absl::OkStatus();
  }

  static std::vector<Attribute> RoleAttributes(const ChatMessage& m) {
    std::vector<Attribute> attributes = {{"role", m.role}};
    if (!m.name.empty()) attributes.emplace_back("name", m.name);
    return attributes;
  }

  void Assistant(const ChatMessage& m) {
    Open("message", RoleAttributes(m));
    if (thinking_) {  // also when empty, also in old turns
      Open("think");
      if (!PythonStrip(m.reasoning_content).empty()) out_.Text(m.reasoning_content);
      Close("think");
    }
    Open("response");
    out_.Text(m.content);
    Close("response");
    if (!m.tool_calls.empty()) {
      Open("tools");
      for (size_t i = 0; i < m.tool_calls.size(); ++i) {
        const Json& function = FunctionOf(m.tool_calls[i]);
        Open("call", {{"tool", NameOf(m.tool_calls[i])}, {"index", std::to_string(i + 1)}});
        if (const auto it = function.find("arguments"); it != function.end()) Arguments(*it);
        Close("call");
      }
      Close("tools");
    }
    EndMessage();
  }

  void Arguments(const Json& arguments) {
    if (!arguments.is_string()) {
      ArgumentList(arguments);
      return;
    }
    const auto& text = arguments.get_ref<const std::string&>();
    if (PythonStrip(text).empty()) return;
    const bool byte_order_mark = text.starts_with("\xEF\xBB\xBF");  // the parser would skip it
    const absl::StatusOr<Json> parsed = ParseJson(text, "arguments");
    if (!byte_order_mark && parsed.ok() && (parsed->is_object() || !Truthy(*parsed))) {
      ArgumentList(*parsed);
      return;
    }
    Open("json", {{"type", "object"}});  // no object: passed on as it is
    out_.Text(text);
    Close("json");
  }

  void ArgumentList(const Json& arguments) {
    if (!arguments.is_object()) return;
    for (const auto& [key, value] : arguments.items()) {
      Open("argument", {{"key", key}, {"type", std::string(KindOf(value))}});
      out_.Text(value.is_string() ? value.get<std::string>() : PythonJson(value));
      Close("argument");
    }
  }

  // Tool results [begin, end): in the order of the calls if every one names a known call, else as given.
  absl::Status ToolResults(size_t begin, size_t end, const Calls& of) {
    const auto& messages = request_.messages;
    const Json* const calls = of.all;
    const std::map<std::string, size_t>& by_id = of.by_id;
    std::vector<size_t> order;
    bool all_known = true;
    for (size_t i = begin; i < end; ++i) {
      order.push_back(i);
      all_known = all_known && by_id.contains(messages[i].tool_call_id);
    }
    if (all_known) {
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return by_id.at(messages[a].tool_call_id) < by_id.at(messages[b].tool_call_id);
      });
    }
    for (size_t n = 0; n < order.size(); ++n) {
      const ChatMessage& m = messages[order[n]];
      std::string name;
      if (all_known) {
        name = NameOf((*calls)[by_id.at(m.tool_call_id)]);
      } else if (!m.name.empty()) {
        name = m.name;
      } else if (calls != nullptr && n < calls->size()) {
        name = NameOf((*calls)[n]);
      } else {
        return InvalidArgument(
            "messages[%d].tool_call_id: \"%s\" is not the id of a call in the assistant message "
            "before it; use that id, or give the tool's name in messages[%d].name",
            order[n], m.tool_call_id, order[n]);
      }
      Message(m.content, {{"role", "tool"}, {"tool", name}, {"index", std::to_string(n + 1)}});
    }
    return absl::OkStatus();
  }

  absl::Status ToolChoice() {
    if (request_.tool_choice != "required" && request_.tool_choice != "none") {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const std::string text,
                     literals_.Get("tool_choice_" + request_.tool_choice, "tool_choice"));
    System("tool-choice", PythonStrip(text));
    return absl::OkStatus();
  }

  absl::Status ResponseFormat() {
    const std::string_view kind = ResponseKind(request_.response_format);
    std::string text;
    if (kind == "json_object") {
      ASSIGN_OR_RETURN(text, literals_.Get("response_json_object", "response_format"));
    } else if (kind == "json_schema") {
      const Json& outer = request_.response_format.at("json_schema");
      const Json* schema = &outer;
      for (const char* key : {"json_schema", "schema"}) {  // the last one found counts
        if (const auto it = outer.find(key); it != outer.end()) schema = &*it;
      }
      ASSIGN_OR_RETURN(text, literals_.Fill("response_json_schema", SortedCompactJson(*schema),
                                            "response_format"));
    } else {
      return absl::OkStatus();
    }
    System("response-format", PythonStrip(text));
    return absl::OkStatus();
  }

  const K3Literals& literals_;
  const ChatRequest& request_;
  const bool thinking_;
  SegmentList out_;
};

class K3ChatFormat final : public ChatFormat {
 public:
  K3ChatFormat(K3Literals literals, const Tokenizer& tokenizer)
      : literals_(std::move(literals)),
        tokenizer_(tokenizer),
        mark_({.open = *tokenizer.SpecialId("<|open|>"),
               .close = *tokenizer.SpecialId("<|close|>"),
               .sep = *tokenizer.SpecialId("<|sep|>"),
               .end_of_message = *tokenizer.SpecialId("<|end_of_msg|>")}) {}

  std::string_view family() const override { return "kimi_k3"; }

  absl::StatusOr<std::vector<Segment>> Render(const ChatRequest& request) const override {
    RETURN_IF_ERROR(ValidateChat(request));
    return Writer(literals_, request).Write();
  }

  absl::StatusOr<std::vector<Segment>> RenderMore(const ChatRequest& request) const override {
    RETURN_IF_ERROR(ValidateChat(request));
    RETURN_IF_ERROR(CheckMore(request));
    return Writer(literals_, request).WriteMore();
  }

  OpenTurn FindOpenTurn(std::span<const TokenId> conversation) const override {
    return FindK3OpenTurn(tokenizer_, mark_, conversation);
  }

  std::unique_ptr<AnswerParser> NewParser(const ChatRequest& request) const override {
    auto parser = NewK3AnswerParser(tokenizer_, request.thinking.value_or(true));
    CHECK_OK(parser.status());  // its tokens were checked at load
    return *std::move(parser);
  }

 private:
  const K3Literals literals_;
  const Tokenizer& tokenizer_;
  const K3TurnTokens mark_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<const ChatFormat>> LoadK3ChatFormat(
    const std::filesystem::path& folder, const Tokenizer& tokenizer) {
  for (const std::string_view name : kMarkers) {
    RETURN_IF_ERROR(NeedSpecial(tokenizer, name).status());
  }
  ASSIGN_OR_RETURN(K3Literals literals, K3Literals::Load(folder));
  return std::make_unique<K3ChatFormat>(std::move(literals), tokenizer);
}

}  // namespace deltamesh
