// Where a conversation's newest turn stands, and what ends it so that messages can follow.
//
// An answer that ended with its end token is whole. One that was cut - at the limit, by a stop string, by a
// client that left - is made whole like this: an unfinished header and an unfinished tool call are dropped,
// for nobody was told of them; then the blocks that are open are closed. What results is what rendering the
// delivered parts of the answer as a message gives, as far as the answer was spelled as rendering spells it.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "runtime/base/ids.h"
#include "runtime/text/tokenizer.h"

namespace deltamesh {

struct OpenTurn {
  size_t keep = 0;                 // leading tokens of the conversation that stay
  std::vector<Segment> closing{};  // follows them; empty when the turn is whole
};

// Special tokens of the two formats, by what they do.
struct K3TurnTokens {
  TokenId open, close, sep, end_of_message;
};
struct LinearTurnTokens {
  TokenId user, assistant, system, middle, end;
  TokenId section_begin, section_end, call_begin, call_end;
};

OpenTurn FindK3OpenTurn(const Tokenizer& tokenizer, const K3TurnTokens& mark,
                        std::span<const TokenId> conversation);
OpenTurn FindLinearOpenTurn(const Tokenizer& tokenizer, const LinearTurnTokens& mark,
                            std::span<const TokenId> conversation);

}  // namespace deltamesh
