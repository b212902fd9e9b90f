// The prefix names of a text that is only described: pieces of named texts, one after another.
//
// Equal descriptions give equal names, and texts that part at a token have the same names before its block
// and others from there on, as the real chain of hashes has them; nothing else of a name matters to a cache.
// Not the real chain: hashing tokens that do not exist would take most of a simulation's time.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/prefix/prefix_key.h"

namespace deltamesh {

class ContentPath {
 public:
  // The first `tokens` tokens of the text with this name. Two texts of different names share no token.
  void Append(uint64_t text, int64_t tokens);
  // Keeps the first `tokens` tokens.
  void Truncate(int64_t tokens);

  int64_t tokens() const { return tokens_; }
  // keys()[i] names the first i + 1 blocks.
  const std::vector<PrefixKey>& keys() const { return keys_; }

 private:
  struct Piece {
    uint64_t text;
    int64_t begin;  // its first token's place here
  };
  PrefixKey NameBlock(size_t first_piece, int64_t begin) const;

  std::vector<Piece> pieces_;
  std::vector<PrefixKey> keys_;
  int64_t tokens_ = 0;
};

}  // namespace deltamesh
