// The text that names a UCX transport, and the two messages that open a connection.
//
// An address carries the blob UCX connects to, a random identity of the process that made it, so that a
// stale one cannot reach whoever got the port since, and a checksum, since UCX does not survive damaged
// blobs. None of it proves who sent it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace deltamesh {

inline constexpr size_t kUcxAddressBytesMax = 8 << 10;

struct UcxAddress {
  std::string identity;   // 32 hexadecimal digits
  std::string host_port;  // for messages: where the first interface listens
  std::string worker;     // ucp_worker_get_address
};

// Printable, without spaces.
std::string FormatUcxAddress(const UcxAddress& address);
absl::StatusOr<UcxAddress> ParseUcxAddress(std::string_view text);

// The first message on a connection, from the side that opens it.
struct UcxHello {
  std::string to;       // the identity that is meant
  std::string nonce;    // 16 hexadecimal digits; comes back in the welcome
  std::string address;  // of the sender, as formatted
};
std::string EncodeUcxHello(const UcxHello& hello);
absl::StatusOr<UcxHello> DecodeUcxHello(std::string_view bytes);

// The answer.
struct UcxWelcome {
  std::string from;   // the identity of the answering side
  std::string nonce;  // of the hello
};
std::string EncodeUcxWelcome(const UcxWelcome& welcome);
absl::StatusOr<UcxWelcome> DecodeUcxWelcome(std::string_view bytes);

std::string RandomHex(int digits);

}  // namespace deltamesh
