// Chat requests and the two chat formats: messages in, prompt segments out; generated tokens in,
// reasoning, content and tool calls out.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/text/answer_parser.h"
#include "runtime/text/json.h"
#include "runtime/text/open_turn.h"
#include "runtime/text/tokenizer.h"

namespace deltamesh {

// One message in the OpenAI shape. Empty fields are absent. JSON values come from ParseJson, which
// bounds their depth.
struct ChatMessage {
  std::string role{};  // system, user, assistant or tool
  std::string content{};
  std::string name{};               // tool: the tool's name, if the caller knows it
  std::string reasoning_content{};  // assistant only
  std::string tool_call_id{};       // tool only
  Json tool_calls{};                // assistant only: null or [{id, function: {name, arguments}}]
  Json tools{};                     // system only: null or tools declared from here on (K3)
};

struct ChatRequest {
  std::vector<ChatMessage> messages{};
  Json tools{};                    // null or an array of declarations in the OpenAI shape
  std::optional<bool> thinking{};  // K3 only; absent: on
  // K3 only: low, high or max; empty: max. The API that clients speak has a "medium" too, which the
  // model was not taught; it means "high", so that nobody who asks for thought gets less of it.
  std::string effort{};
  std::string effort_field = "effort";  // what errors call it: the caller's name of the field
  std::string tool_choice{};            // empty, auto, none or required
  Json response_format{};               // null, "text", "json_object" or an object with a type
  bool add_generation_prompt = true;
};

// Of one conversation; each takes more memory than it may have bytes.
inline constexpr int64_t kChatMessagesMax = 65536;
// INVALID_ARGUMENT when there are more.
absl::Status CheckMessageCount(int64_t messages);

// Messages from their OpenAI JSON: content may be null, a string or an array of text parts; errors name
// the field, "messages[2].content: ...". Unknown keys are ignored.
absl::StatusOr<std::vector<ChatMessage>> ChatMessagesFromJson(const Json& messages);

// How one family writes chats. Immutable and thread-safe once loaded.
class ChatFormat {
 public:
  virtual ~ChatFormat() = default;

  // The family follows config.json: K3 nests its text model in text_config. `tokenizer` outlives the
  // result and must have the special tokens of the family.
  static absl::StatusOr<std::unique_ptr<const ChatFormat>> Load(const std::filesystem::path& folder,
                                                                const Tokenizer& tokenizer);

  virtual std::string_view family() const = 0;  // "kimi_k3" or "kimi_linear"

  // The prompt. INVALID_ARGUMENT names the field at fault; FAILED_PRECONDITION if the checkpoint lacks
  // a text that the request needs. No segment is empty; all special ones name one special token.
  virtual absl::StatusOr<std::vector<Segment>> Render(const ChatRequest& request) const = 0;

  // The messages of `request` as they follow a conversation whose last turn has ended: tools and effort,
  // which stand at the beginning of a conversation, are refused. Errors and segments as of Render.
  virtual absl::StatusOr<std::vector<Segment>> RenderMore(const ChatRequest& request) const = 0;
  // How the last turn of `conversation`, prompt and answer, is ended before RenderMore's segments.
  virtual OpenTurn FindOpenTurn(std::span<const TokenId> conversation) const = 0;

  // For the answer to a prompt that Render or RenderMore made of `request`.
  virtual std::unique_ptr<AnswerParser> NewParser(const ChatRequest& request) const = 0;
};

}  // namespace deltamesh
