// Names of prefixes: one chained hash per block of 64 tokens, the same in routers and workers.
//
//   h(0) = SHA-256( "deltamesh.prefix.1" 00 | text(model) | text(salt) )
//   h(i) = SHA-256( h(i-1) | the 64 tokens of block i-1, each as u32 little-endian )
//   key of the first i blocks = the first 16 bytes of h(i),  i >= 1
//
// with text(x) = its length in bytes as u64 little-endian, then its bytes. `model` is PrefixModel: the digest
// of what is served (weights, width, tokenizer) and the layout of its state, so another model's state has
// other names. `salt` is the tenant's, so that no tenant can learn from timing what another one asked:
// without the salt its names cannot be computed, as they could be with a hash that is only fast.
//
// Examples, model "m", salt "" and tokens 0, 1, 2, ...:
//   first 64 tokens    b2968e10ef16e3f2887b2528d57a8d9f
//   first 128 tokens   78e0192003358307726284505e6dde96
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/ids.h"
#include "runtime/prefix/prefix_key.h"

namespace deltamesh {

// "DIGEST/LAYOUT", the layout as a decimal number.
std::string PrefixModel(std::string_view digest, uint32_t state_layout);

// The keys of a growing sequence. Not thread-safe. About 0.4 us a block.
class PrefixChain {
 public:
  PrefixChain(std::string_view model, std::string_view salt);
  PrefixChain(PrefixChain&&) noexcept;
  PrefixChain& operator=(PrefixChain&&) noexcept;
  ~PrefixChain();

  // Continues the sequence; keys appear as blocks fill.
  void Append(std::span<const TokenId> tokens);

  // keys()[i] names the first i + 1 blocks.
  const std::vector<PrefixKey>& keys() const { return keys_; }
  int64_t tokens() const { return tokens_; }
  // The first eight bytes of h(0), little-endian: a number for the tenant, 0 for none of them.
  uint64_t tenant() const { return tenant_; }

 private:
  struct Sha256;
  void Close();

  std::unique_ptr<Sha256> sha_;
  std::array<uint8_t, 32> hash_;
  std::vector<uint8_t> open_;  // hash_ and the open block, as they will be hashed
  std::vector<PrefixKey> keys_;
  int64_t tokens_ = 0;
  uint64_t tenant_ = 0;
};

}  // namespace deltamesh
