// Answers of K3: blocks think, response and tools between open(tag) and close(tag) headers.
#include <map>
#include <optional>

#include "runtime/text/chat_formats.h"

namespace deltamesh {
namespace {

// A header longer than this is text.
constexpr size_t kMaxHeaderBytes = 16 << 10;

struct Header {
  bool open = false;
  std::string tag;
  std::map<std::string, std::string, std::less<>> attributes;
  bool Is(bool want_open, std::string_view want_tag) const {
    return open == want_open && tag == want_tag && attributes.empty();
  }
};

std::string UnescapeAttribute(std::string_view value) {
  std::string out;
  for (size_t i = 0; i < value.size(); ++i) {
    if (value.substr(i).starts_with("&quot;")) {
      out.push_back('"');
      i += 5;
    } else if (value.substr(i).starts_with("&amp;")) {
      out.push_back('&');
      i += 4;
    } else {
      out.push_back(value[i]);
    }
  }
  return out;
}

// `tag name="value" name="value"`, or nothing if the text has another form.
std::optional<Header> ParseHeader(bool open, std::string_view text) {
  Header header;
  header.open = open;
  const size_t space = std::min(text.find(' '), text.size());
  header.tag = text.substr(0, space);
  text.remove_prefix(space);
  while (!text.empty()) {
    const size_t equals = text.find("=\"");
    if (text[0] != ' ' || equals == text.npos || equals == 1) return std::nullopt;
    const size_t end = text.find('"', equals + 2);
    if (end == text.npos) return std::nullopt;
    header.attributes[std::string(text.substr(1, equals - 1))] =
        DecodeUtf8(UnescapeAttribute(text.substr(equals + 2, end - equals - 2)));
    text.remove_prefix(end + 1);
  }
  return header;
}

bool IsBlank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == text.npos; }

struct Markers {
  TokenId open, close, sep;
};

class K3AnswerParser final : public AnswerParser {
 public:
  K3AnswerParser(const Tokenizer& tokenizer, const Markers& markers, bool thinking)
      : AnswerParser(tokenizer),
        mark_(markers),
        state_(thinking ? State::kThink : State::kResponse) {}

 private:
  // kBetween: outside every block. kCall: inside a call, outside its arguments.
  enum class State { kThink, kBetween, kResponse, kTools, kCall, kArgument, kJson };

  void Accept(TokenId token) override {
    const std::string_view bytes = Shown(token);
    if (in_header_) {
      if (token == mark_.sep) {
        in_header_ = false;
        return EndHeader();
      }
      if (!tokenizer_.is_special(token) && header_.size() + bytes.size() <= kMaxHeaderBytes) {
        header_ += bytes;
        return;
      }
      AbandonHeader();
    }
    if (token == mark_.open || token == mark_.close) {
      in_header_ = true;
      header_open_ = token == mark_.open;
      header_.clear();
      return;
    }
    Text(bytes);
  }

  void AbandonHeader() {
    in_header_ = false;
    Text(header_);
  }

  void EndHeader() {
    const std::optional<Header> header = ParseHeader(header_open_, header_);
    if (!header || !Enter(*header)) Text(header_);
  }

  // Text that is no header, in the block it stands in.
  void Text(std::string_view bytes) {
    switch (state_) {
      case State::kThink:
        return Reasoning(bytes);
      case State::kBetween:
      case State::kResponse:
      case State::kTools:
        return Content(bytes);
      case State::kCall:
        call_raw_ += bytes;
        if (!IsBlank(bytes)) AbandonCall();
        return;
      case State::kArgument:
      case State::kJson:
        call_raw_ += bytes;
        value_ += bytes;
    }
  }

  // Acts on a header that belongs here; false if it does not.
  bool Enter(const Header& h) {
    switch (state_) {
      case State::kThink:
        if (!h.Is(false, "think")) return false;
        EndReasoning();
        state_ = State::kBetween;
        return true;
      case State::kBetween:
        return EnterBlock(h);
      case State::kResponse:
        if (!h.Is(false, "response")) return false;
        EndContent();
        state_ = State::kBetween;
        return true;
      case State::kTools:
        return EnterCall(h);
      case State::kCall:
        return EnterArgument(h);
      case State::kArgument:
        return LeaveValue(h, "argument");
      case State::kJson:
        return LeaveValue(h, "json");
    }
    return false;
  }

  bool EnterBlock(const Header& h) {
    if (h.Is(false, "message")) return true;
    if (h.Is(true, "think")) {
      state_ = State::kThink;
    } else if (h.Is(true, "response")) {
      state_ = State::kResponse;
    } else if (h.Is(true, "tools")) {
      state_ = State::kTools;
    } else {
      return false;
    }
    EndContent();
    return true;
  }

  bool EnterCall(const Header& h) {
    if (h.Is(false, "tools")) {
      EndContent();
      state_ = State::kBetween;
      return true;
    }
    const auto tool = h.attributes.find("tool");
    if (!h.open || h.tag != "call" || tool == h.attributes.end() || tool->second.empty())
      return false;
    EndContent();
    state_ = State::kCall;
    call_raw_ = header_;
    name_ = tool->second;
    arguments_.clear();
    json_.reset();
    return true;
  }

  bool EnterArgument(const Header& h) {
    if (h.Is(false, "call")) {
      ToolCall("", name_, Arguments());
      call_raw_.clear();
      state_ = State::kTools;
      return true;
    }
    const auto key = h.attributes.find("key");
    if (json_.has_value() || !h.open) return false;
    if (h.tag == "argument" && key != h.attributes.end()) {
      const auto type = h.attributes.find("type");
      key_ = key->second;
      is_string_ = type == h.attributes.end() || type->second == "string";
      state_ = State::kArgument;
    } else if (h.tag == "json" && arguments_.empty()) {
      state_ = State::kJson;
    } else {
      return false;
    }
    call_raw_ += header_;
    value_.clear();
    return true;
  }

  bool LeaveValue(const Header& h, std::string_view tag) {
    if (!h.Is(false, tag)) return false;
    call_raw_ += header_;
    const std::string value = DecodeUtf8(value_);
    if (state_ == State::kJson) {
      json_ = value;
    } else {
      SetArgument(key_, is_string_ || !IsJson(value) ? JsonString(value) : value);
    }
    state_ = State::kCall;
    return true;
  }

  static bool IsJson(const std::string& text) {
    return !text.starts_with("\xEF\xBB\xBF") && ParseJson(text, "argument").ok();
  }

  // A key given twice keeps its first place and its last value, as in Python's dict.
  void SetArgument(const std::string& key, const std::string& json) {
    for (auto& [k, v] : arguments_) {
      if (k == key) {
        v = json;
        return;
      }
    }
    arguments_.emplace_back(key, json);
  }

  std::string Arguments() const {
    if (json_.has_value() && !IsBlank(*json_)) return *json_;
    std::string out = "{";
    for (const auto& [key, json] : arguments_) {
      if (out.size() > 1) out += ", ";
      out += JsonString(key) + ": " + json;
    }
    return out + "}";
  }

  void AbandonCall() {
    state_ = State::kTools;
    Content(call_raw_);
    call_raw_.clear();
  }

  void End() override {
    if (in_header_) AbandonHeader();
    if (state_ == State::kCall || state_ == State::kArgument || state_ == State::kJson) {
      AbandonCall();
    }
  }

  const Markers mark_;
  State state_;

  bool in_header_ = false;
  bool header_open_ = false;
  std::string header_;  // between marker and sep: all of it that is text

  // The open call.
  std::string call_raw_;  // all of it as text, in case it never closes
  std::string name_;
  std::vector<std::pair<std::string, std::string>> arguments_;  // key, JSON text
  std::optional<std::string> json_;                             // arguments as one block
  std::string key_;
  bool is_string_ = false;
  std::string value_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AnswerParser>> NewK3AnswerParser(const Tokenizer& tokenizer,
                                                                bool thinking) {
  Markers m;
  ASSIGN_OR_RETURN(m.open, NeedSpecial(tokenizer, "<|open|>"));
  ASSIGN_OR_RETURN(m.close, NeedSpecial(tokenizer, "<|close|>"));
  ASSIGN_OR_RETURN(m.sep, NeedSpecial(tokenizer, "<|sep|>"));
  return std::make_unique<K3AnswerParser>(tokenizer, m, thinking);
}

}  // namespace deltamesh
