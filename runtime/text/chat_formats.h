// The families behind ChatFormat, and what their files share.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

#include "runtime/text/chat.h"

namespace deltamesh {

absl::StatusOr<std::unique_ptr<const ChatFormat>> LoadK3ChatFormat(
    const std::filesystem::path& folder, const Tokenizer& tokenizer);
absl::StatusOr<std::unique_ptr<const ChatFormat>> LoadLinearChatFormat(const Tokenizer& tokenizer);

absl::StatusOr<std::unique_ptr<AnswerParser>> NewK3AnswerParser(const Tokenizer& tokenizer,
                                                                bool thinking);
absl::StatusOr<std::unique_ptr<AnswerParser>> NewLinearAnswerParser(const Tokenizer& tokenizer);

// Everything about a request that both families check: roles, types, well-formed text.
absl::Status ValidateChat(const ChatRequest& request);

// Refuses what only the beginning of a conversation can say.
absl::Status CheckMore(const ChatRequest& request);

// The function part of a tool call: {"function": {...}} or the call itself.
const Json& FunctionOf(const Json& call);
// "text", "json_object" or "json_schema"; the request was validated.
std::string_view ResponseKind(const Json& response_format);

// The id of a special token the family cannot do without.
absl::StatusOr<TokenId> NeedSpecial(const Tokenizer& tokenizer, std::string_view name);

// Collects the segments of a prompt; empty ones are left out.
class SegmentList {
 public:
  void Special(std::string_view name) { Add(name, true); }
  void Text(std::string_view text) { Add(text, false); }
  std::vector<Segment> Take() { return std::move(segments_); }

 private:
  void Add(std::string_view text, bool special) {
    if (!text.empty()) segments_.push_back({std::string(text), special});
  }
  std::vector<Segment> segments_;
};

}  // namespace deltamesh
