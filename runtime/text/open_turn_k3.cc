#include <algorithm>
#include <string>

#include "runtime/text/chat_formats.h"
#include "runtime/text/open_turn.h"

namespace deltamesh {
namespace {

// The blocks of one message, as deep as they are open. Only known blocks in their place count, as for the
// parser of answers; anything else is text.
class Blocks {
 public:
  void Open(std::string_view header, size_t at) {
    const std::string tag(header.substr(0, header.find(' ')));
    if (!Belongs(tag)) return;
    if (tag == "message") {
      answer_ = header.find("role=\"assistant\"") != header.npos;
      responded_ = unended_ = false;
    }
    responded_ |= tag == "response";
    if (tag == "tools") calls_ = 0;
    open_.push_back({tag, at});
  }

  void Close(std::string_view tag) {
    if (open_.empty() || open_.back().tag != tag) return;
    calls_ += tag == "call";
    unended_ |= tag == "message";
    open_.pop_back();
  }

  // Drops a call that is not finished. The tokens that stay, of `keep`.
  size_t DropUnfinishedCall(size_t keep) {
    const auto call =
        std::find_if(open_.begin(), open_.end(), [](const Block& b) { return b.tag == "call"; });
    if (call != open_.end()) {
      keep = call->at;
      open_.erase(call, open_.end());
    }
    if (!open_.empty() && open_.back().tag == "tools" && calls_ == 0) {
      keep = open_.back().at;
      open_.pop_back();
    }
    return keep;
  }

  std::vector<Segment> Closing() {
    SegmentList out;
    if (open_.empty()) {
      if (unended_) out.Special("<|end_of_msg|>");
      return out.Take();
    }
    const auto close = [&out](std::string_view tag) {
      out.Special("<|close|>");
      out.Text(tag);
      out.Special("<|sep|>");
    };
    for (; open_.size() > 1; open_.pop_back()) close(open_.back().tag);
    if (answer_ && !responded_) {
      out.Special("<|open|>");
      out.Text("response");
      out.Special("<|sep|>");
      close("response");
    }
    close("message");
    out.Special("<|end_of_msg|>");
    return out.Take();
  }

 private:
  struct Block {
    std::string tag;
    size_t at;
  };

  bool Belongs(std::string_view tag) const {
    const std::string_view in = open_.empty() ? "" : std::string_view(open_.back().tag);
    if (in.empty()) return tag == "message";
    if (in == "message") return tag == "think" || tag == "response" || tag == "tools";
    if (in == "tools") return tag == "call";
    return in == "call" && (tag == "argument" || tag == "json");
  }

  std::vector<Block> open_;
  bool answer_ = false, responded_ = false;
  bool unended_ = false;  // the message is closed, its last token is missing
  int calls_ = 0;         // finished ones of the tools block
};

}  // namespace

OpenTurn FindK3OpenTurn(const Tokenizer& tokenizer, const K3TurnTokens& mark,
                        std::span<const TokenId> all) {
  OpenTurn turn = {.keep = all.size()};
  while (turn.keep > 0 && tokenizer.is_eos(all[turn.keep - 1]) &&
         all[turn.keep - 1] != mark.end_of_message) {
    --turn.keep;  // ended, but not as a message is
  }
  size_t begin = turn.keep;
  while (begin > 0 && all[begin - 1] != mark.end_of_message) --begin;

  Blocks blocks;
  constexpr size_t kNone = static_cast<size_t>(-1);
  size_t header_at = kNone;
  size_t unfinished = kNone;  // the header, or the first of those that it cut off
  std::string header;
  for (size_t i = begin; i < turn.keep; ++i) {
    if (all[i] == mark.open || all[i] == mark.close) {
      if (header_at == kNone) unfinished = i;
      header_at = i;
      header.clear();
    } else if (header_at != kNone && all[i] == mark.sep) {
      if (all[header_at] == mark.open) {
        blocks.Open(header, header_at);
      } else {
        blocks.Close(header);
      }
      header_at = kNone;
    } else if (header_at != kNone && tokenizer.is_special(all[i])) {
      header_at = kNone;  // text, as it turns out
    } else if (header_at != kNone) {
      header += tokenizer.TokenBytes(all[i]);
    }
  }
  if (header_at != kNone) turn.keep = unfinished;
  turn.keep = blocks.DropUnfinishedCall(turn.keep);
  turn.closing = blocks.Closing();
  return turn;
}

}  // namespace deltamesh
