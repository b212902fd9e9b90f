#include "runtime/text/utf8.h"

namespace deltamesh {
namespace {

// What a lead byte promises: how many bytes follow and the range of the first of them (the range is
// what excludes overlong forms, surrogates and code points above U+10FFFF).
struct Lead {
  int following = -1;  // -1: not a lead byte
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
};

Lead LeadOf(unsigned char b) {
  if (b < 0x80) return {0};
  if (b < 0xC2) return {-1};
  if (b < 0xE0) return {1};
  if (b == 0xE0) return {2, 0xA0, 0xBF};
  if (b == 0xED) return {2, 0x80, 0x9F};
  if (b < 0xF0) return {2};
  if (b == 0xF0) return {3, 0x90, 0xBF};
  if (b < 0xF4) return {3};
  if (b == 0xF4) return {3, 0x80, 0x8F};
  return {-1};
}

bool IsContinuation(unsigned char b) { return (b & 0xC0) == 0x80; }

}  // namespace

std::optional<size_t> FirstInvalidUtf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const auto first = static_cast<unsigned char>(text[i]);
    if (first < 0x80) {
      ++i;
      continue;
    }
    const Lead lead = LeadOf(first);
    if (lead.following < 0 || text.size() - i <= static_cast<size_t>(lead.following)) return i;
    const auto second = static_cast<unsigned char>(text[i + 1]);
    if (second < lead.low || second > lead.high) return i;
    for (int k = 2; k <= lead.following; ++k) {
      if (!IsContinuation(static_cast<unsigned char>(text[i + k]))) return i;
    }
    i += 1 + lead.following;
  }
  return std::nullopt;
}

Utf8Char Utf8CharAt(std::string_view text, size_t at) {
  const auto byte = [&](size_t k) {
    return static_cast<uint32_t>(static_cast<unsigned char>(text[at + k]));
  };
  const uint32_t b = byte(0);
  if (b < 0x80) return {b, 1};
  const size_t bytes = b < 0xE0 ? 2 : b < 0xF0 ? 3 : 4;
  if (text.size() - at < bytes) return {0xFFFD, text.size() - at};  // cut off: stay inside
  uint32_t code = b & (0xFF >> (bytes + 1));
  for (size_t k = 1; k < bytes; ++k) code = code << 6 | (byte(k) & 0x3F);
  return {code, bytes};
}

bool IsPythonSpace(uint32_t c) {
  if (c <= 0x20) return (c >= 0x09 && c <= 0x0D) || c >= 0x1C;
  if (c < 0x85) return false;
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::string_view PythonStrip(std::string_view text) {
  size_t begin = 0;
  while (begin < text.size()) {
    const Utf8Char c = Utf8CharAt(text, begin);
    if (!IsPythonSpace(c.code)) break;
    begin += c.bytes;
  }
  size_t end = text.size();
  while (end > begin) {
    size_t start = end - 1;
    while (start > begin && IsContinuation(static_cast<unsigned char>(text[start]))) --start;
    if (!IsPythonSpace(Utf8CharAt(text, start).code)) break;
    end = start;
  }
  return text.substr(begin, end - begin);
}

std::string Utf8Assembler::Push(std::string_view bytes) {
  std::string out;
  out.reserve(pending_.size() + bytes.size());
  for (const char c : bytes) Accept(static_cast<unsigned char>(c), out);
  return out;
}

std::string Utf8Assembler::Finish() {
  if (pending_.empty()) return "";
  pending_.clear();
  missing_ = 0;
  return std::string(kReplacementCharacter);
}

void Utf8Assembler::Accept(unsigned char byte, std::string& out) {
  if (missing_ > 0) {
    if (byte >= low_ && byte <= high_) {
      pending_.push_back(static_cast<char>(byte));
      low_ = 0x80;
      high_ = 0xBF;
      if (--missing_ == 0) {
        out += pending_;
        pending_.clear();
      }
      return;
    }
    out += Finish();  // `byte` starts anew
  }
  const Lead lead = LeadOf(byte);
  if (lead.following < 0) {
    out += kReplacementCharacter;
  } else if (lead.following == 0) {
    out.push_back(static_cast<char>(byte));
  } else {
    pending_.assign(1, static_cast<char>(byte));
    missing_ = lead.following;
    low_ = lead.low;
    high_ = lead.high;
  }
}

std::string DecodeUtf8(std::string_view bytes) {
  Utf8Assembler assembler;
  std::string out = assembler.Push(bytes);
  return out += assembler.Finish();
}

}  // namespace deltamesh
