// UTF-8 as the tokenizer and the answer stream need it: validation with an offset, characters one
// by one, and bytes to whole characters incrementally.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deltamesh {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// Offset of the first byte that is not part of a well-formed character (no surrogates, nothing
// overlong, nothing above U+10FFFF); absent if `text` is well formed.
std::optional<size_t> FirstInvalidUtf8(std::string_view text);

struct Utf8Char {
  uint32_t code = 0;
  size_t bytes = 0;
};
// The character at `text[at]`, where one starts. `text` is well formed; at worst the code is nonsense.
Utf8Char Utf8CharAt(std::string_view text, size_t at);

// Python's str.isspace for one code point: Unicode White_Space and the separators U+001C to U+001F.
bool IsPythonSpace(uint32_t code);

// `text` (well formed) without white space at either end, as Python's str.strip.
std::string_view PythonStrip(std::string_view text);

// Turns bytes that arrive in any grouping into whole characters. Each maximal ill-formed sequence
// becomes one U+FFFD, exactly as Python's bytes.decode("utf-8", "replace") on all bytes at once; a
// character that later bytes may still complete (at most 3 bytes) is kept back. Not thread-safe.
class Utf8Assembler {
 public:
  std::string Push(std::string_view bytes);
  // What is kept back can no longer be completed: U+FFFD, or nothing. Ready for new input after.
  std::string Finish();

 private:
  void Accept(unsigned char byte, std::string& out);

  std::string pending_;    // a proper prefix of a well-formed character
  int missing_ = 0;        // bytes until it is whole
  unsigned char low_ = 0;  // range allowed for the next byte
  unsigned char high_ = 0;
};

// All of `bytes` as text, ill-formed sequences as U+FFFD.
std::string DecodeUtf8(std::string_view bytes);

}  // namespace deltamesh
