#include "runtime/transfer/ucx_util.h"

#include <netdb.h>
#include <netinet/in.h>

#include <cctype>
#include <cstring>
#include <set>

#include "runtime/base/status.h"

namespace deltamesh {

absl::StatusOr<SocketAddress> ParseSocketAddress(std::string_view text) {
  const size_t colon = text.rfind(':');
  const absl::Status bad = InvalidArgument(
      "address: '%s' is not numeric host:port; write 127.0.0.1:9000 or [::1]:9000", text);
  if (colon == std::string_view::npos || colon + 1 == text.size()) return bad;
  std::string host(text.substr(0, colon));
  const std::string port(text.substr(colon + 1));
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);

  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (host.empty() || getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return bad;
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

std::string FormatSocketAddress(std::string_view host, int port) {
  const bool v6 = host.find(':') != std::string_view::npos;
  return v6 ? absl::StrFormat("[%s]:%d", host, port) : absl::StrFormat("%s:%d", host, port);
}

int PortOf(const sockaddr_storage& storage) {
  if (storage.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

absl::Status UcxError(std::string_view what, ucs_status_t status) {
  return Unavailable("%s: %s", what, ucs_status_string(status));
}

std::string LanesOf(std::string_view info) {
  // Lines look like "#   lane[1]:  2:tcp/lo.0 md[1]  -> ...".
  std::set<std::string> names;
  for (size_t at = info.find("lane["); at != std::string_view::npos;
       at = info.find("lane[", at + 1)) {
    const std::string_view line = info.substr(at, info.find('\n', at) - at);
    const size_t slash = line.find('/');
    if (slash == std::string_view::npos) continue;
    const auto part_of_name = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-';
    };
    size_t begin = slash, end = slash + 1;
    while (begin > 0 && part_of_name(line[begin - 1])) --begin;
    while (end < line.size() && part_of_name(line[end])) ++end;
    names.emplace(line.substr(begin, end - begin));
  }
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "" : " ") + name;
  return joined;
}

}  // namespace deltamesh
