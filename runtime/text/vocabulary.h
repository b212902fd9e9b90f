// The ordinary tokens of a tiktoken file: bytes by rank and rank by bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/base/ids.h"
#include "runtime/base/status.h"

namespace deltamesh {

// Immutable and thread-safe once made. Ranks are 0 to size() - 1, and every single byte is a token.
class Vocabulary {
 public:
  static constexpr TokenId kNone = -1;

  // Parses lines "base64 rank"; `name` is what errors call the file.
  static absl::StatusOr<Vocabulary> Parse(std::string_view contents, std::string_view name);

  int64_t size() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  std::string_view Bytes(TokenId rank) const;
  // kNone if `bytes` is no token.
  TokenId Find(std::string_view bytes) const {
    if (bytes.size() > longest_) return kNone;
    const auto it = ranks_.find(ToAbsl(bytes));
    return it == ranks_.end() ? kNone : it->second;
  }

 private:
  Vocabulary() = default;

  std::vector<char> bytes_;        // all tokens one after another; keys of ranks_ point into it
  std::vector<uint32_t> offsets_;  // size() + 1
  absl::flat_hash_map<absl::string_view, TokenId> ranks_;
  size_t longest_ = 0;
};

}  // namespace deltamesh
