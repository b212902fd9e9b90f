#include "services/simulate/content_path.h"

#include <algorithm>
#include <cstring>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

// Finalizer of SplitMix64.
uint64_t Stir(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

struct Halves {
  uint64_t low = 1, high = 2;

  explicit Halves(const PrefixKey& key) {
    std::memcpy(&low, key.bytes.data(), 8);
    std::memcpy(&high, key.bytes.data() + 8, 8);
  }
  Halves() = default;
  void Mix(uint64_t value) {
    low = Stir(low + 0x9e3779b97f4a7c15u + value);
    high = Stir(high ^ (value * 0xff51afd7ed558ccdu + 0xc4ceb9fe1a85ec53u));
  }
  PrefixKey key() const {
    PrefixKey key;
    std::memcpy(key.bytes.data(), &low, 8);
    std::memcpy(key.bytes.data() + 8, &high, 8);
    return key;
  }
};

}  // namespace

void ContentPath::Append(uint64_t text, int64_t tokens) {
  CHECK(tokens >= 0);
  if (tokens == 0) return;
  pieces_.push_back({text, tokens_});
  tokens_ += tokens;
  size_t piece = pieces_.size() - 1;
  int64_t begin = static_cast<int64_t>(keys_.size()) * kPrefixBlockTokens;
  while (piece > 0 && pieces_[piece].begin > begin) --piece;
  for (; begin + kPrefixBlockTokens <= tokens_; begin += kPrefixBlockTokens) {
    while (piece + 1 < pieces_.size() && pieces_[piece + 1].begin <= begin) ++piece;
    keys_.push_back(NameBlock(piece, begin));
  }
}

// The block that begins in `first_piece`: the name before it, and which parts of which texts it holds.
PrefixKey ContentPath::NameBlock(size_t first_piece, int64_t begin) const {
  Halves name = keys_.empty() ? Halves() : Halves(keys_.back());
  for (size_t i = first_piece; i < pieces_.size(); ++i) {
    const int64_t from = std::max(begin, pieces_[i].begin);
    if (from >= begin + kPrefixBlockTokens) break;
    name.Mix(pieces_[i].text);
    name.Mix(static_cast<uint64_t>(from - pieces_[i].begin) << 8 |
             static_cast<uint64_t>(from - begin));
  }
  return name.key();
}

void ContentPath::Truncate(int64_t tokens) {
  CHECK(tokens >= 0 && tokens <= tokens_, "%d of %d tokens", tokens, tokens_);
  tokens_ = tokens;
  while (!pieces_.empty() && pieces_.back().begin >= tokens) pieces_.pop_back();
  keys_.resize(static_cast<size_t>(tokens / kPrefixBlockTokens));
}

}  // namespace deltamesh
