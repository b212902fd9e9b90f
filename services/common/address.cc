#include "services/common/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

// 0, or the error of binding a socket to `at`, which is closed again.
int TryBind(const addrinfo& at) {
  const int fd = socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  const int one = 1, only = at.ai_family == AF_INET6 &&
                            !IN6_IS_ADDR_UNSPECIFIED(
                                &reinterpret_cast<const sockaddr_in6*>(at.ai_addr)->sin6_addr);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (at.ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
  const int error = bind(fd, at.ai_addr, at.ai_addrlen) == 0 ? 0 : errno;
  close(fd);
  return error;
}

bool IsNumeric(const std::string& host) {
  in6_addr address;
  const std::string name = host.substr(0, host.find('%'));  // without the zone of a link-local one
  return inet_pton(AF_INET, name.c_str(), &address) == 1 ||
         inet_pton(AF_INET6, name.c_str(), &address) == 1;
}

}  // namespace

absl::StatusOr<std::pair<std::string, int>> ParseHostPort(std::string_view flag,
                                                          std::string_view text) {
  const size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon == text.npos ? 0 : colon);
  const bool brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (brackets) host = host.substr(1, host.size() - 2);
  if (host.empty() || host.find_first_of("[] /") != host.npos) {
    return InvalidArgument("%s: \"%s\" is not host:port; use one like localhost:8080 or [::1]:8080",
                           flag, text);
  }
  if (!brackets && host.find(':') != host.npos) {
    return InvalidArgument("%s: \"%s\" has more than one colon; write IPv6 as [::1]:8080", flag,
                           text);
  }
  int port = -1;
  const std::string_view digits = text.substr(colon + 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size() || port < 0 || port > 65535) {
    return InvalidArgument("%s: the port of \"%s\" is not a number from 0 to 65535", flag, text);
  }
  return std::make_pair(std::string(host), port);
}

std::string JoinHostPort(std::string_view host, int port) {
  if (host.find(':') == host.npos) return absl::StrFormat("%s:%d", host, port);
  return absl::StrFormat("[%s]:%d", host, port);
}

absl::Status CheckListen(std::string_view flag, std::string_view text) {
  ASSIGN_OR_RETURN(const auto at, ParseHostPort(flag, text));
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* raw = nullptr;
  const int unknown =
      getaddrinfo(at.first.c_str(), std::to_string(at.second).c_str(), &hints, &raw);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> found(raw, freeaddrinfo);
  if (unknown != 0) {
    return InvalidArgument(
        "%s: \"%s\" is no address of this machine: %s; use localhost, 0.0.0.0 or [::]", flag, text,
        gai_strerror(unknown));
  }
  int last = 0;
  bool any = false;
  for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
    const int error = TryBind(*a);
    if (error == EADDRINUSE || error == EACCES) {
      return Unavailable("%s: %s cannot be listened on: %s; choose another port", flag, text,
                         strerror(error));
    }
    any |= error == 0;
    last = error;
  }
  if (any) return absl::OkStatus();
  return InvalidArgument(
      "%s: \"%s\" is no address of this machine: %s; use localhost, 0.0.0.0 or [::]", flag, text,
      strerror(last));
}

absl::StatusOr<std::string> NumericHost(std::string_view flag, std::string_view host) {
  const std::string name(host);
  if (IsNumeric(name)) return name;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* raw = nullptr;
  const int unknown = name.empty() ? EAI_NONAME : getaddrinfo(name.c_str(), "0", &hints, &raw);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> found(raw, freeaddrinfo);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* a = found.get(); unknown == 0 && a != nullptr; a = a->ai_next) {
      char text[NI_MAXHOST];
      if (a->ai_family != family || TryBind(*a) != 0) continue;
      if (getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) ==
          0) {
        return std::string(text);
      }
    }
  }
  return InvalidArgument("%s: \"%s\" is no address of this machine: %s; use its name or address",
                         flag, host,
                         unknown != 0 ? gai_strerror(unknown) : "its addresses are others'");
}

}  // namespace deltamesh
