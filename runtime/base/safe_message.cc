#include "runtime/base/safe_message.h"

#include <algorithm>

namespace deltamesh {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Bytes of the well-formed character at the start of `text`; 0: there is none.
size_t CharacterBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const size_t bytes = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() < bytes) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  const bool overlong = (lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xF0 && byte(1) < 0x90);
  const bool surrogate = lead == 0xED && byte(1) > 0x9F;
  const bool beyond = lead == 0xF4 && byte(1) > 0x8F;
  return overlong || surrogate || beyond ? 0 : bytes;
}

}  // namespace

std::string SafeMessage(std::string_view message, size_t max) {
  std::string out;
  out.reserve(std::min(message.size(), max));
  while (!message.empty()) {
    const size_t bytes = CharacterBytes(message);
    const std::string_view piece = bytes > 0 ? message.substr(0, bytes) : kReplacement;
    if (out.size() + piece.size() > max) break;
    out += piece;
    message.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return out;
}

std::string SafeMessage(const absl::Status& status, size_t max) {
  const std::string message(status.message());
  return SafeMessage(message.empty() ? absl::StatusCodeToString(status.code()) : message, max);
}

}  // namespace deltamesh
