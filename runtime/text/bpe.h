// Byte pair encoding of one piece: start from single bytes and merge, again and again, the adjacent
// pair whose joined bytes have the lowest rank (the leftmost of equals), until no pair is a token.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "runtime/base/ids.h"
#include "runtime/text/vocabulary.h"

namespace deltamesh {

// Keeps its buffers between pieces. One thread at a time. n log n in the length of a piece.
class BytePairEncoder {
 public:
  // `vocabulary` outlives this.
  explicit BytePairEncoder(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

  // Appends the tokens of `piece`; a piece that is a token is taken whole.
  void Encode(std::string_view piece, std::vector<TokenId>& out);

 private:
  // Candidate merge of the node at `start` with the one after it, up to `end`.
  struct Merge {
    TokenId rank;
    uint32_t start;
    uint32_t end;
  };
  void Offer(std::string_view piece, uint32_t start);

  const Vocabulary& vocabulary_;
  // A node is a token so far, named by its first byte: where it ends, where the one before starts,
  // its id.
  std::vector<uint32_t> end_;
  std::vector<uint32_t> before_;
  std::vector<TokenId> id_;  // kNone: swallowed by a merge
  std::vector<Merge> heap_;
};

}  // namespace deltamesh
