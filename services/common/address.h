// "host:port" as people write it: IPv6 addresses stand in brackets, "[::1]:8080".
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace deltamesh {

// The host, without brackets, and a port in [0, 65535]. Errors name the flag.
absl::StatusOr<std::pair<std::string, int>> ParseHostPort(std::string_view flag,
                                                          std::string_view text);

// The opposite: brackets around what has colons.
std::string JoinHostPort(std::string_view host, int port);

// Whether a server could listen on "host:port" now: the name is known here, an address of it is this
// machine's, the port is free. A look, not a reservation. Asks the resolver, so it may take its time.
absl::Status CheckListen(std::string_view flag, std::string_view text);

// `host` as a numeric address: itself when it is one, else the first address of this machine that the name
// has, of IPv4 where it has both kinds.
absl::StatusOr<std::string> NumericHost(std::string_view flag, std::string_view host);

}  // namespace deltamesh
