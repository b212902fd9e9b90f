#include "runtime/text/chat.h"

#include <algorithm>
#include <array>

#include "runtime/text/chat_formats.h"
#include "runtime/text/utf8.h"

namespace deltamesh {
namespace {

std::string MessageField(size_t i, std::string_view field) {
  return absl::StrFormat("messages[%d].%s", i, field);
}

absl::Status WrongType(std::string_view field, const Json& value, std::string_view want) {
  return InvalidArgument("%s: is of type %s; use %s", field, value.type_name(), want);
}

// A string field that may be absent or null.
absl::Status ReadString(const Json& object, const char* key, const std::string& field,
                        std::string& out) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return absl::OkStatus();
  if (!it->is_string()) return WrongType(field, *it, "a string");
  out = it->get<std::string>();
  return absl::OkStatus();
}

absl::Status ReadContent(const Json& message, const std::string& field, std::string& out) {
  const auto it = message.find("content");
  if (it == message.end() || !it->is_array()) {
    if (it != message.end() && !it->is_null() && !it->is_string()) {
      return WrongType(field, *it, "a string or an array of text parts");
    }
    return ReadString(message, "content", field, out);
  }
  for (size_t i = 0; i < it->size(); ++i) {
    const Json& part = (*it)[i];
    const std::string part_field = absl::StrFormat("%s[%d]", field, i);
    if (!part.is_object())
      return WrongType(part_field, part, "{\"type\": \"text\", \"text\": ...}");
    std::string type;
    RETURN_IF_ERROR(ReadString(part, "type", part_field + ".type", type));
    if (type != "text") {
      return InvalidArgument("%s.type: \"%s\" is not supported; only \"text\" parts are",
                             part_field, type);
    }
    std::string text;
    RETURN_IF_ERROR(ReadString(part, "text", part_field + ".text", text));
    out += text;
  }
  return absl::OkStatus();
}

absl::StatusOr<ChatMessage> MessageFromJson(const Json& json, size_t i) {
  if (!json.is_object()) return WrongType(absl::StrFormat("messages[%d]", i), json, "an object");
  ChatMessage m;
  const auto read = [&](const char* key, std::string& out) {
    return ReadString(json, key, MessageField(i, key), out);
  };
  RETURN_IF_ERROR(read("role", m.role));
  RETURN_IF_ERROR(ReadContent(json, MessageField(i, "content"), m.content));
  RETURN_IF_ERROR(read("name", m.name));
  RETURN_IF_ERROR(read("reasoning_content", m.reasoning_content));
  if (m.reasoning_content.empty()) RETURN_IF_ERROR(read("reasoning", m.reasoning_content));
  RETURN_IF_ERROR(read("tool_call_id", m.tool_call_id));
  if (m.role == "tool") {  // other spellings in use
    if (m.tool_call_id.empty()) RETURN_IF_ERROR(read("id", m.tool_call_id));
    std::string tool;
    RETURN_IF_ERROR(read("tool", tool));
    if (!tool.empty()) m.name = tool;
  }
  if (const auto it = json.find("tool_calls"); it != json.end()) m.tool_calls = *it;
  if (const auto it = json.find("tools"); it != json.end()) m.tools = *it;
  return m;
}

absl::Status CheckUtf8(std::string_view text, const std::string& field) {
  if (const auto at = FirstInvalidUtf8(text)) {
    return InvalidArgument("%s: byte %d (0x%02x) is not UTF-8; send well-formed UTF-8", field, *at,
                           static_cast<unsigned char>(text[*at]));
  }
  return absl::OkStatus();
}

absl::Status CheckTool(const Json& tool, const std::string& at) {
  std::string type, name;
  RETURN_IF_ERROR(ReadString(tool, "type", at + ".type", type));
  if (type != "function") {
    return InvalidArgument("%s.type: \"%s\" is not served; use \"function\"", at, type);
  }
  const auto function = tool.find("function");
  if (function == tool.end() || !function->is_object()) {
    return InvalidArgument("%s.function: missing or not an object; describe the function", at);
  }
  RETURN_IF_ERROR(ReadString(*function, "name", at + ".function.name", name));
  if (!name.empty()) return absl::OkStatus();
  return InvalidArgument("%s.function.name: missing or empty; name the function", at);
}

absl::Status CheckTools(const Json& tools, const std::string& field) {
  if (tools.is_null()) return absl::OkStatus();
  if (!tools.is_array()) return WrongType(field, tools, "an array of tool declarations");
  for (size_t i = 0; i < tools.size(); ++i) {
    if (!tools[i].is_object()) {
      return WrongType(absl::StrFormat("%s[%d]", field, i), tools[i], "an object");
    }
    RETURN_IF_ERROR(CheckTool(tools[i], absl::StrFormat("%s[%d]", field, i)));
  }
  return absl::OkStatus();
}

absl::Status CheckToolCalls(const Json& calls, const std::string& field) {
  if (calls.is_null()) return absl::OkStatus();
  if (!calls.is_array()) return WrongType(field, calls, "an array of tool calls");
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string at = absl::StrFormat("%s[%d]", field, i);
    if (!calls[i].is_object()) return WrongType(at, calls[i], "an object");
    std::string id;
    RETURN_IF_ERROR(ReadString(calls[i], "id", at + ".id", id));
    const Json& function = FunctionOf(calls[i]);
    if (!function.is_object()) return WrongType(at + ".function", function, "an object");
    std::string name;
    RETURN_IF_ERROR(ReadString(function, "name", at + ".function.name", name));
    if (name.empty()) {
      return InvalidArgument("%s.function.name: missing or empty; name the tool that was called",
                             at);
    }
    const auto arguments = function.find("arguments");
    if (arguments == function.end() || arguments->is_null() || arguments->is_object()) continue;
    if (!arguments->is_string()) {
      return WrongType(at + ".function.arguments", *arguments, "a JSON string or an object");
    }
    RETURN_IF_ERROR(
        CheckUtf8(arguments->get_ref<const std::string&>(), at + ".function.arguments"));
  }
  return absl::OkStatus();
}

absl::Status CheckMessage(const ChatMessage& m, size_t i) {
  static constexpr std::array<std::string_view, 4> kRoles = {"system", "user", "assistant", "tool"};
  if (std::find(kRoles.begin(), kRoles.end(), m.role) == kRoles.end()) {
    return InvalidArgument("%s: \"%s\" is unknown; use system, user, assistant or tool",
                           MessageField(i, "role"), m.role);
  }
  RETURN_IF_ERROR(CheckUtf8(m.content, MessageField(i, "content")));
  RETURN_IF_ERROR(CheckUtf8(m.name, MessageField(i, "name")));
  RETURN_IF_ERROR(CheckUtf8(m.reasoning_content, MessageField(i, "reasoning_content")));
  RETURN_IF_ERROR(CheckUtf8(m.tool_call_id, MessageField(i, "tool_call_id")));
  const auto only = [&](bool given, std::string_view field, std::string_view role) -> absl::Status {
    if (!given || m.role == role) return absl::OkStatus();
    return InvalidArgument("%s: given in a message of role \"%s\"; only role \"%s\" has it",
                           MessageField(i, field), m.role, role);
  };
  RETURN_IF_ERROR(only(!m.reasoning_content.empty(), "reasoning_content", "assistant"));
  RETURN_IF_ERROR(only(!m.tool_calls.empty(), "tool_calls", "assistant"));
  RETURN_IF_ERROR(only(!m.tool_call_id.empty(), "tool_call_id", "tool"));
  RETURN_IF_ERROR(only(!m.tools.empty(), "tools", "system"));
  RETURN_IF_ERROR(CheckToolCalls(m.tool_calls, MessageField(i, "tool_calls")));
  return CheckTools(m.tools, MessageField(i, "tools"));
}

absl::Status CheckResponseFormat(const Json& format) {
  if (format.is_null()) return absl::OkStatus();
  std::string kind;
  if (format.is_string()) {
    kind = format.get<std::string>();
  } else if (format.is_object()) {
    RETURN_IF_ERROR(ReadString(format, "type", "response_format.type", kind));
  } else {
    return WrongType("response_format", format, "an object with a \"type\"");
  }
  if (kind == "json_schema") {
    const auto schema = format.is_object() ? format.find("json_schema") : format.end();
    if (!format.is_object() || schema == format.end() || !schema->is_object()) {
      return InvalidArgument(
          "response_format.json_schema: missing or not an object; put the schema "
          "in response_format.json_schema.schema");
    }
  } else if (kind != "text" && kind != "json_object") {
    return InvalidArgument(
        "response_format.type: \"%s\" is unknown; use text, json_object or json_schema", kind);
  }
  return absl::OkStatus();
}

absl::Status CheckOneOf(std::string_view field, std::string_view value,
                        std::initializer_list<std::string_view> allowed, std::string_view remedy) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return absl::OkStatus();
  return InvalidArgument("%s: \"%s\" is unknown; use %s", field, value, remedy);
}

}  // namespace

absl::Status CheckMessageCount(int64_t messages) {
  if (messages <= kChatMessagesMax) return absl::OkStatus();
  return InvalidArgument("messages: %d; send at most %d", messages, kChatMessagesMax);
}

absl::StatusOr<std::vector<ChatMessage>> ChatMessagesFromJson(const Json& messages) {
  if (!messages.is_array()) return WrongType("messages", messages, "an array of messages");
  RETURN_IF_ERROR(CheckMessageCount(static_cast<int64_t>(messages.size())));
  std::vector<ChatMessage> out;
  for (size_t i = 0; i < messages.size(); ++i) {
    ASSIGN_OR_RETURN(out.emplace_back(), MessageFromJson(messages[i], i));
  }
  return out;
}

absl::Status ValidateChat(const ChatRequest& request) {
  if (request.messages.empty()) {
    return InvalidArgument("messages: empty; send at least one message");
  }
  for (size_t i = 0; i < request.messages.size(); ++i) {
    RETURN_IF_ERROR(CheckMessage(request.messages[i], i));
  }
  RETURN_IF_ERROR(CheckTools(request.tools, "tools"));
  RETURN_IF_ERROR(CheckOneOf(request.effort_field, request.effort,
                             {"", "low", "medium", "high", "max"},
                             "low, medium (taken as high), high or max"));
  RETURN_IF_ERROR(CheckOneOf("tool_choice", request.tool_choice, {"", "auto", "none", "required"},
                             "auto, none or required"));
  return CheckResponseFormat(request.response_format);
}

absl::Status CheckMore(const ChatRequest& request) {
  if (!request.tools.empty()) {
    return InvalidArgument(
        "tools: a conversation declares them at its beginning; leave them out, or begin a new one");
  }
  if (!request.effort.empty()) {
    return InvalidArgument(
        "%s: a conversation says it at its beginning; leave it out, or begin a new one",
        request.effort_field);
  }
  return absl::OkStatus();
}

const Json& FunctionOf(const Json& call) {
  const auto it = call.find("function");
  return it == call.end() ? call : *it;
}

std::string_view ResponseKind(const Json& format) {
  if (format.is_null()) return "text";
  const Json& kind = format.is_object() ? format.at("type") : format;
  return kind.get_ref<const std::string&>();
}

absl::StatusOr<TokenId> NeedSpecial(const Tokenizer& tokenizer, std::string_view name) {
  if (const auto id = tokenizer.SpecialId(name)) return *id;
  return InvalidArgument(
      "tokenizer_config.json: no added token is named \"%s\", which the chat format needs; "
      "use the file of the same checkpoint as config.json",
      name);
}

absl::StatusOr<std::unique_ptr<const ChatFormat>> ChatFormat::Load(
    const std::filesystem::path& folder, const Tokenizer& tokenizer) {
  const std::filesystem::path path = folder / "config.json";
  ASSIGN_OR_RETURN(const Json config, ReadJsonFile(path));
  if (!config.is_object()) {
    return InvalidArgument(
        "%s: top level is not an object; copy the file again from the checkpoint", path.string());
  }
  if (config.contains("text_config")) return LoadK3ChatFormat(folder, tokenizer);
  return LoadLinearChatFormat(tokenizer);
}

}  // namespace deltamesh
