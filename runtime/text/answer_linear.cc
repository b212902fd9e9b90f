// Answers of Kimi-Linear: content, then perhaps a section of tool calls, each id, arguments, end.
#include "runtime/text/chat_formats.h"

namespace deltamesh {
namespace {

std::string_view StripBlanks(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

// "functions.NAME:N" gives NAME; an id of another form is the name itself.
std::string NameInId(std::string_view id) {
  constexpr std::string_view kPrefix = "functions.";
  if (id.starts_with(kPrefix)) id.remove_prefix(kPrefix.size());
  const size_t colon = id.rfind(':');
  if (colon != id.npos && colon + 1 < id.size() &&
      id.find_first_not_of("0123456789", colon + 1) == id.npos) {
    id = id.substr(0, colon);
  }
  return std::string(id);
}

struct Markers {
  TokenId section_begin, section_end, call_begin, argument_begin, call_end;
};

class LinearAnswerParser final : public AnswerParser {
 public:
  LinearAnswerParser(const Tokenizer& tokenizer, const Markers& markers)
      : AnswerParser(tokenizer), mark_(markers) {}

 private:
  enum class State { kContent, kSection, kId, kArguments };

  void Accept(TokenId token) override {
    const std::string_view bytes = Shown(token);
    switch (state_) {
      case State::kContent:
        if (token != mark_.section_begin) return Content(bytes);
        EndContent();
        state_ = State::kSection;
        return;
      case State::kSection:
        if (token == mark_.section_end) {
          state_ = State::kContent;
        } else if (token == mark_.call_begin) {
          state_ = State::kId;
          raw_.clear();
          id_.clear();
          arguments_.clear();
        } else {
          Content(bytes);
        }
        return;
      case State::kId:
        if (token == mark_.argument_begin) {
          state_ = State::kArguments;
          return;
        }
        return Collect(token, id_);
      case State::kArguments:
        if (token == mark_.call_end && !NameInId(StripBlanks(id_)).empty()) return FinishCall();
        return Collect(token, arguments_);
    }
  }

  // Text of a call goes to `part`; a marker out of place makes the whole call content.
  void Collect(TokenId token, std::string& part) {
    if (token == mark_.section_begin || token == mark_.section_end || token == mark_.call_begin ||
        token == mark_.argument_begin || token == mark_.call_end) {
      Abandon();
      return Accept(token);
    }
    part += Shown(token);
    raw_ += Shown(token);
  }

  void Abandon() {
    Content(raw_);
    raw_.clear();
    state_ = State::kSection;
  }

  void FinishCall() {
    const std::string id = DecodeUtf8(StripBlanks(id_));
    const std::string_view arguments = StripBlanks(arguments_);
    ToolCall(id, NameInId(id), arguments.empty() ? "{}" : DecodeUtf8(arguments));
    raw_.clear();
    state_ = State::kSection;
  }

  void End() override {
    if (state_ == State::kId || state_ == State::kArguments) Abandon();
  }

  const Markers mark_;
  State state_ = State::kContent;
  std::string raw_;  // all of the open call as text, in case it never closes
  std::string id_;
  std::string arguments_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AnswerParser>> NewLinearAnswerParser(const Tokenizer& tokenizer) {
  Markers m;
  ASSIGN_OR_RETURN(m.section_begin, NeedSpecial(tokenizer, "<|tool_calls_section_begin|>"));
  ASSIGN_OR_RETURN(m.section_end, NeedSpecial(tokenizer, "<|tool_calls_section_end|>"));
  ASSIGN_OR_RETURN(m.call_begin, NeedSpecial(tokenizer, "<|tool_call_begin|>"));
  ASSIGN_OR_RETURN(m.argument_begin, NeedSpecial(tokenizer, "<|tool_call_argument_begin|>"));
  ASSIGN_OR_RETURN(m.call_end, NeedSpecial(tokenizer, "<|tool_call_end|>"));
  return std::make_unique<LinearAnswerParser>(tokenizer, m);
}

}  // namespace deltamesh
