// Small pieces of the UCX transport that need no connection.
#pragma once

#include <sys/socket.h>
#include <ucs/type/status.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace deltamesh {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// "127.0.0.1:80", "[::1]:80". Numeric only: nothing is looked up.
absl::StatusOr<SocketAddress> ParseSocketAddress(std::string_view text);
std::string FormatSocketAddress(std::string_view host, int port);
// The port of an address that the system filled in.
int PortOf(const sockaddr_storage& storage);

// UNAVAILABLE with `what` and UCX's words for `status`.
absl::Status UcxError(std::string_view what, ucs_status_t status);

// "tcp/lo tcp/eth0": the transports of the lanes in the text ucp_ep_print_info writes.
std::string LanesOf(std::string_view endpoint_info);

}  // namespace deltamesh
