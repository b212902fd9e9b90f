#include "runtime/transfer/ucx_address.h"

#include <algorithm>
#include <span>

#include "absl/strings/escaping.h"
#include "runtime/base/crc32c.h"
#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/transfer/ucx_util.h"

namespace deltamesh {
namespace {

constexpr std::string_view kScheme = "ucx2";
constexpr char kBetween = '|';
constexpr size_t kIdentityDigits = 32, kNonceDigits = 16;

bool IsHex(std::string_view text, size_t digits) {
  return text.size() == digits && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

// The part before the next separator; takes both off `text`.
std::string_view NextPart(std::string_view* text) {
  const size_t at = std::min(text->find(kBetween), text->size());
  const std::string_view part = text->substr(0, at);
  text->remove_prefix(std::min(at + 1, text->size()));
  return part;
}

std::string Checksum(std::string_view text) {
  return absl::StrFormat("%08x", Crc32c(std::as_bytes(std::span(text.data(), text.size()))));
}

}  // namespace

std::string FormatUcxAddress(const UcxAddress& address) {
  std::string blob;
  absl::WebSafeBase64Escape(ToAbsl(address.worker), &blob);
  const std::string text = absl::StrFormat("%s%c%s%c%s%c%s", kScheme, kBetween, address.host_port,
                                           kBetween, address.identity, kBetween, blob);
  return absl::StrFormat("%s%c%s", text, kBetween, Checksum(text));
}

absl::StatusOr<UcxAddress> ParseUcxAddress(std::string_view text) {
  const auto bad = [&](std::string_view why) {
    return InvalidArgument(
        "transport address of %d bytes: %s; use what address() of a transport of "
        "this version gave",
        text.size(), why);
  };
  if (text.size() > kUcxAddressBytesMax) return bad("too long");
  const size_t last = text.rfind(kBetween);
  if (last == std::string_view::npos || text.substr(last + 1) != Checksum(text.substr(0, last)))
    return bad("its checksum differs");
  std::string_view rest = text.substr(0, last);
  UcxAddress address;
  if (NextPart(&rest) != kScheme) return bad("it is of another version");
  address.host_port = NextPart(&rest);
  address.identity = NextPart(&rest);
  if (!ParseSocketAddress(address.host_port).ok()) return bad("its host and port are malformed");
  if (!IsHex(address.identity, kIdentityDigits)) return bad("its identity is malformed");
  if (!absl::WebSafeBase64Unescape(ToAbsl(rest), &address.worker) || address.worker.empty())
    return bad("its UCX part is malformed");
  return address;
}

std::string EncodeUcxHello(const UcxHello& hello) {
  return absl::StrFormat("%s%s%s", hello.to, hello.nonce, hello.address);
}

absl::StatusOr<UcxHello> DecodeUcxHello(std::string_view bytes) {
  if (bytes.size() < kIdentityDigits + kNonceDigits)
    return InvalidArgument("hello: %d bytes are too few", bytes.size());
  UcxHello hello;
  hello.to = bytes.substr(0, kIdentityDigits);
  hello.nonce = bytes.substr(kIdentityDigits, kNonceDigits);
  hello.address = bytes.substr(kIdentityDigits + kNonceDigits);
  if (!IsHex(hello.to, kIdentityDigits) || !IsHex(hello.nonce, kNonceDigits))
    return InvalidArgument("hello: its identity or nonce is malformed");
  return hello;
}

std::string EncodeUcxWelcome(const UcxWelcome& welcome) {
  return absl::StrFormat("%s%s", welcome.from, welcome.nonce);
}

absl::StatusOr<UcxWelcome> DecodeUcxWelcome(std::string_view bytes) {
  if (bytes.size() != kIdentityDigits + kNonceDigits)
    return InvalidArgument("welcome: %d bytes instead of %d", bytes.size(),
                           kIdentityDigits + kNonceDigits);
  return UcxWelcome{.from = std::string(bytes.substr(0, kIdentityDigits)),
                    .nonce = std::string(bytes.substr(kIdentityDigits))};
}

std::string RandomHex(int digits) {
  SystemEntropy entropy;
  std::string text;
  while (static_cast<int>(text.size()) < digits) text += absl::StrFormat("%016x", entropy.Next());
  text.resize(static_cast<size_t>(digits));
  return text;
}

}  // namespace deltamesh
