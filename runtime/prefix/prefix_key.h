// The name of a prefix of tokens: 128 bits of the hash chain in prefix_hash.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

namespace deltamesh {

// Tokens of a block, the unit in which prefixes are named.
inline constexpr int64_t kPrefixBlockTokens = 64;

struct PrefixKey {
  std::array<uint8_t, 16> bytes{};

  // The first eight bytes, little-endian: what compact indexes hold. Never proof of equality.
  uint64_t index() const {
    uint64_t value = 0;
    for (size_t i = 8; i-- > 0;) value = value << 8 | bytes[i];
    return value;
  }
  std::string Hex() const;  // 32 lower-case digits

  friend auto operator<=>(const PrefixKey&, const PrefixKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const PrefixKey& key) {
    return H::combine(std::move(h), key.index());  // the bytes are a hash already
  }
};

}  // namespace deltamesh
