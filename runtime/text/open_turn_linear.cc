#include <cstddef>

#include "runtime/text/chat_formats.h"
#include "runtime/text/open_turn.h"

namespace deltamesh {
namespace {

constexpr size_t kNone = static_cast<size_t>(-1);

// What is open at the end of a message.
struct Open {
  bool message = false;
  size_t header = kNone, section = kNone, call = kNone;  // where they begin
  int calls = 0;                                         // finished ones of the section
};

void Read(const LinearTurnTokens& mark, TokenId token, size_t at, Open* open) {
  if (token == mark.user || token == mark.assistant || token == mark.system) {
    if (open->header == kNone) open->header = at;
  } else if (open->header != kNone) {
    if (token != mark.middle) return;
    *open = Open();
    open->message = true;
  } else if (!open->message) {
    return;
  } else if (token == mark.section_begin && open->section == kNone) {
    open->section = at;
    open->calls = 0;
  } else if (token == mark.section_end && open->section != kNone) {
    open->section = kNone;
    open->call = kNone;
  } else if (token == mark.call_begin && open->section != kNone) {
    open->call = at;
  } else if (token == mark.call_end && open->call != kNone) {
    open->call = kNone;
    ++open->calls;
  }
}

}  // namespace

OpenTurn FindLinearOpenTurn(const Tokenizer& tokenizer, const LinearTurnTokens& mark,
                            std::span<const TokenId> all) {
  OpenTurn turn = {.keep = all.size()};
  while (turn.keep > 0 && tokenizer.is_eos(all[turn.keep - 1]) && all[turn.keep - 1] != mark.end) {
    --turn.keep;  // ended, but not as a message is
  }
  size_t begin = turn.keep;
  while (begin > 0 && all[begin - 1] != mark.end) --begin;
  Open open;
  for (size_t i = begin; i < turn.keep; ++i) Read(mark, all[i], i, &open);
  if (open.header != kNone) turn.keep = open.header;
  SegmentList out;
  if (open.message) {
    if (open.call != kNone) turn.keep = open.call;
    if (open.section != kNone && open.calls == 0) turn.keep = open.section;
    if (open.section != kNone && open.calls > 0) out.Special("<|tool_calls_section_end|>");
    out.Special("<|im_end|>");
  }
  turn.closing = out.Take();
  return turn;
}

}  // namespace deltamesh
