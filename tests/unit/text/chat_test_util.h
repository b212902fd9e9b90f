// What the tests of chats share.
#pragma once

#include "runtime/text/chat.h"
#include "tests/unit/text/text_test_util.h"

namespace deltamesh {

// A request from the JSON form of the golden files.
inline ChatRequest RequestFromJson(const Json& json) {
  ChatRequest r;
  auto messages = ChatMessagesFromJson(json.at("messages"));
  CHECK_OK(messages.status());
  r.messages = *std::move(messages);
  const auto get = [&](const char* key) {
    const auto it = json.find(key);
    return it == json.end() ? Json() : *it;
  };
  r.tools = get("tools");
  r.response_format = get("response_format");
  if (!get("thinking").is_null()) r.thinking = get("thinking").get<bool>();
  if (!get("thinking_effort").is_null()) r.effort = get("thinking_effort").get<std::string>();
  if (!get("tool_choice").is_null()) r.tool_choice = get("tool_choice").get<std::string>();
  if (!get("add_generation_prompt").is_null()) {
    r.add_generation_prompt = get("add_generation_prompt").get<bool>();
  }
  return r;
}

inline std::unique_ptr<const ChatFormat> GoldenFormat(const std::string& family,
                                                      const Tokenizer& tokenizer) {
  auto format = ChatFormat::Load(GoldenFolder(family), tokenizer);
  CHECK_OK(format.status());
  return *std::move(format);
}

// Everything a parser gives for `tokens` when they arrive in groups of random size up to `most`.
inline AnswerDelta ParseAll(AnswerParser& parser, std::span<const TokenId> tokens,
                            std::mt19937_64& rng, size_t most) {
  AnswerDelta all;
  const auto add = [&](AnswerDelta d) {
    all.reasoning += d.reasoning;
    all.content += d.content;
    for (auto& call : d.tool_calls) all.tool_calls.push_back(std::move(call));
    // Deltas are whole characters.
    EXPECT_EQ(FirstInvalidUtf8(d.reasoning), std::nullopt);
    EXPECT_EQ(FirstInvalidUtf8(d.content), std::nullopt);
  };
  for (size_t at = 0; at < tokens.size();) {
    const size_t n = std::min(tokens.size() - at, 1 + rng() % most);
    add(parser.Push(tokens.subspan(at, n)));
    at += n;
  }
  add(parser.Finish());
  return all;
}

inline AnswerDelta ParseAll(AnswerParser& parser, std::span<const TokenId> tokens) {
  std::mt19937_64 rng(1);
  return ParseAll(parser, tokens, rng, 1);
}

}  // namespace deltamesh
