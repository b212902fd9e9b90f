#include "services/cli/terminal_text.h"

#include <cstdint>

#include "absl/strings/str_format.h"

namespace deltamesh {
namespace {

// Code points of three bytes that begin with E2: separators of lines, and what turns the direction of text.
bool Misleads(uint32_t point) {
  return (point >= 0x2028 && point <= 0x202E) || (point >= 0x2066 && point <= 0x2069) ||
         point == 0x200E || point == 0x200F;
}

}  // namespace

std::string ForTerminal(std::string_view text) {
  const auto at = [text](size_t i) {
    return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0};
  };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const uint32_t point =
        at(i) == 0xE2 ? (at(i) & 0x0Fu) << 12 | (at(i + 1) & 0x3Fu) << 6 | (at(i + 2) & 0x3Fu) : 0;
    if (at(i) < 0x20 || at(i) == 0x7F) {
      out += absl::StrFormat("\\x%02x", at(i));
    } else if (at(i) == 0xC2 && at(i + 1) >= 0x80 && at(i + 1) < 0xA0) {
      out += absl::StrFormat("\\x%02x", at(++i));
    } else if (Misleads(point)) {
      out += absl::StrFormat("\\u%04x", point);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace deltamesh
