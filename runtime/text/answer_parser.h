// Splits a chat answer, token by token, into reasoning, content and tool calls.
//
// The structure is recognised by special token ids only, never by text that looks like it. Whatever is
// outside a recognised structure becomes text of the block it stands in, so that no generated text is
// lost. Special tokens are no text: one out of place gives nothing, as in TextStream. Deltas do not
// depend on how the tokens are grouped into calls, apart from where they are cut.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/ids.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

namespace deltamesh {

// A finished call in the OpenAI shape. `arguments` is JSON unless the model wrote none.
struct AnswerToolCall {
  int64_t index = 0;  // within the answer, from 0
  std::string id;
  std::string name;
  std::string arguments;
  friend bool operator==(const AnswerToolCall&, const AnswerToolCall&) = default;
};

struct AnswerDelta {
  std::string reasoning;
  std::string content;
  std::vector<AnswerToolCall> tool_calls;
  bool empty() const { return reasoning.empty() && content.empty() && tool_calls.empty(); }
};

// One answer, one thread.
class AnswerParser {
 public:
  // `tokenizer` outlives this.
  explicit AnswerParser(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  virtual ~AnswerParser() = default;
  AnswerParser(const AnswerParser&) = delete;
  AnswerParser& operator=(const AnswerParser&) = delete;

  // Whole characters only; bytes no later token can complete become U+FFFD.
  AnswerDelta Push(std::span<const TokenId> tokens);
  // The answer is over: what was held back is released. A call that was not closed becomes content.
  AnswerDelta Finish();

  int64_t tool_call_count() const { return tool_calls_; }

 protected:
  virtual void Accept(TokenId token) = 0;
  virtual void End() = 0;

  void Reasoning(std::string_view bytes) { delta_.reasoning += reasoning_.Push(bytes); }
  void Content(std::string_view bytes) { delta_.content += content_.Push(bytes); }
  // A block ended: half a character at its end stays half.
  void EndReasoning() { delta_.reasoning += reasoning_.Finish(); }
  void EndContent() { delta_.content += content_.Finish(); }
  // Empty `id`: one is made from the call's index.
  void ToolCall(std::string id, std::string name, std::string arguments);

  // The text a token stands for: none for a special one.
  std::string_view Shown(TokenId token) const {
    return tokenizer_.is_special(token) ? std::string_view() : tokenizer_.TokenBytes(token);
  }

  const Tokenizer& tokenizer_;

 private:
  AnswerDelta delta_;
  Utf8Assembler reasoning_;
  Utf8Assembler content_;
  int64_t tool_calls_ = 0;
};

}  // namespace deltamesh
