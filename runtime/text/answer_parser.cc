#include "runtime/text/answer_parser.h"

#include <utility>

namespace deltamesh {

AnswerDelta AnswerParser::Push(std::span<const TokenId> tokens) {
  for (const TokenId token : tokens) {
    if (!tokenizer_.is_eos(token)) Accept(token);
  }
  return std::exchange(delta_, {});
}

AnswerDelta AnswerParser::Finish() {
  End();
  EndReasoning();
  EndContent();
  return std::exchange(delta_, {});
}

void AnswerParser::ToolCall(std::string id, std::string name, std::string arguments) {
  AnswerToolCall call;
  call.index = tool_calls_++;
  call.id = id.empty() ? absl::StrFormat("call_%d", call.index) : std::move(id);
  call.name = std::move(name);
  call.arguments = std::move(arguments);
  delta_.tool_calls.push_back(std::move(call));
}

}  // namespace deltamesh
