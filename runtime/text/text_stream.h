// Generated tokens to text as it may be shown: whole characters, cut at the first stop string.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/ids.h"
#include "runtime/base/status.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

namespace deltamesh {

inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopStringBytes = 256;

// Passes text on up to the first match of a stop string: the match that starts earliest, the shortest of
// those. Text that may still become part of a match is held back, at most kMaxStopStringBytes - 1 bytes
// of it. What comes out in total does not depend on how the input is grouped. One thread.
class StopFilter {
 public:
  StopFilter() = default;  // no stop strings
  // INVALID_ARGUMENT names `stop[i]`: too many, empty, too long, not UTF-8.
  static absl::StatusOr<StopFilter> Create(std::vector<std::string> stops);

  // Text that is safe to show now. Nothing after a match.
  std::string Push(std::string_view text);
  // The end of the answer: no held text can become a match any more.
  std::string Finish();

  bool stopped() const { return !matched_.empty(); }
  const std::string& stop_string() const { return matched_; }  // empty: none

 private:
  struct Match {
    size_t start;  // npos: none
    size_t stop;   // which one
  };
  Match FirstMatch() const;
  // The earliest place from which all that is left is a proper prefix of a stop string; or the end.
  size_t FirstPartial() const;
  std::string StopAt(const Match& match);

  std::vector<std::string> stops_;
  size_t longest_ = 0;
  std::string held_;
  std::string matched_;
};

// Detokeniser and StopFilter in one. One answer, one thread; `tokenizer` outlives it.
class TextStream {
 public:
  struct Options {
    std::vector<std::string> stops{};
    bool show_special = false;  // special tokens give their names instead of nothing
  };
  static absl::StatusOr<TextStream> Create(const Tokenizer& tokenizer, Options options);

  std::string Push(std::span<const TokenId> tokens);
  std::string Finish();

  bool stopped() const { return filter_.stopped(); }
  const std::string& stop_string() const { return filter_.stop_string(); }

 private:
  TextStream(const Tokenizer& tokenizer, StopFilter filter, bool show_special)
      : tokenizer_(&tokenizer), filter_(std::move(filter)), show_special_(show_special) {}

  const Tokenizer* tokenizer_;
  Utf8Assembler assembler_;
  StopFilter filter_;
  bool show_special_;
};

}  // namespace deltamesh
