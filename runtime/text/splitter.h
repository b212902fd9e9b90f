// The pre-tokeniser: cuts text into the pieces that byte pair encoding never merges across.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace deltamesh {

// Giant inputs are cut before splitting, as part of the tokenizer's definition: into slices of at
// most kMaxSliceChars characters, and those wherever more than kMaxRunChars characters in a row are
// all blank or all non-blank (blank as Python's str.isspace says).
inline constexpr size_t kMaxSliceChars = 400'000;
inline constexpr size_t kMaxRunChars = 25'000;
std::vector<std::string_view> CutGiantText(std::string_view text);

// Holds the compiled split pattern. Thread-safe once made; moving is not.
class Splitter {
 public:
  static absl::StatusOr<Splitter> Create();
  Splitter(Splitter&&) noexcept;
  Splitter& operator=(Splitter&&) noexcept;
  ~Splitter();

  // Working memory of one thread: match data and a machine-code stack that grows to 64 MiB at most.
  class Scratch;
  struct ScratchDeleter {
    void operator()(Scratch* scratch) const;
  };
  using ScratchPtr = std::unique_ptr<Scratch, ScratchDeleter>;
  ScratchPtr NewScratch() const;

  // Appends the pieces of `text`, which is well-formed UTF-8. Together they are the whole text.
  absl::Status Split(std::string_view text, Scratch& scratch,
                     std::vector<std::string_view>& pieces) const;

 private:
  struct Compiled;
  explicit Splitter(std::unique_ptr<Compiled> compiled);
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace deltamesh
