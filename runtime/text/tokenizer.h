// Text to token ids and back, for checkpoints with a tiktoken vocabulary.
//
// Ids: the ranks of tiktoken.model, then kReservedTokens special ones, named by
// tokenizer_config.json or else `<|reserved_token_ID|>`. Text from users is always encoded as
// ordinary text: a special token spelled in it stays bytes. Only segments marked special may
// contain special tokens.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/base/ids.h"
#include "runtime/base/status.h"
#include "runtime/text/bpe.h"
#include "runtime/text/splitter.h"
#include "runtime/text/vocabulary.h"

namespace deltamesh {

// A piece of a prompt. Each is encoded on its own: nothing merges across segments.
struct Segment {
  std::string text;
  bool special = false;  // the names of special tokens in `text` mean those tokens
  friend bool operator==(const Segment&, const Segment&) = default;
};

// Immutable and thread-safe once loaded.
class Tokenizer {
 public:
  static constexpr int64_t kReservedTokens = 256;

  // Reads tiktoken.model, tokenizer_config.json, config.json and (if there) generation_config.json.
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> Load(const std::filesystem::path& folder);

  // INVALID_ARGUMENT with the byte offset if the text is not UTF-8. Nothing is added in front.
  absl::StatusOr<std::vector<TokenId>> EncodeOrdinary(std::string_view text) const;
  absl::StatusOr<std::vector<TokenId>> EncodeSegments(std::span<const Segment> segments) const;
  // The pieces that bytes are merged within, for tests and inspection. Views into `text`.
  absl::StatusOr<std::vector<std::string_view>> SplitText(std::string_view text) const;

  // The bytes a token stands for (part of a character perhaps; a special token's name); empty for
  // an id outside [0, vocab_size()).
  std::string_view TokenBytes(TokenId id) const;
  // All bytes as text; ill-formed ones become U+FFFD.
  std::string Decode(std::span<const TokenId> ids) const;

  std::optional<TokenId> SpecialId(std::string_view name) const;
  bool is_special(TokenId id) const { return id >= vocabulary_.size() && id < vocab_size(); }
  // Tokens that end an answer, ascending; never empty.
  const std::vector<TokenId>& eos_ids() const { return eos_ids_; }
  bool is_eos(TokenId id) const;
  int64_t vocab_size() const { return vocabulary_.size() + kReservedTokens; }

 private:
  Tokenizer(Vocabulary vocabulary, Splitter splitter);
  struct Work;

  absl::Status NameSpecials(const std::filesystem::path& file);
  absl::Status ReadConfigs(const std::filesystem::path& folder);
  absl::Status AppendOrdinary(std::string_view text, Work& work, std::vector<TokenId>& out) const;
  absl::Status AppendSpecial(std::string_view text, Work& work, std::vector<TokenId>& out) const;

  Vocabulary vocabulary_;
  Splitter splitter_;
  std::vector<std::string> special_names_;  // by id - vocabulary_.size()
  absl::flat_hash_map<std::string, TokenId> special_ids_;
  std::array<std::vector<TokenId>, 256> special_by_first_byte_;  // longest name first
  std::vector<TokenId> eos_ids_;
};

}  // namespace deltamesh
