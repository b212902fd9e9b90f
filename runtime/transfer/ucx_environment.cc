// The variables UCX reads at start; see ucx_transport.h.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/transfer/ucx_transport.h"
#include "runtime/transfer/ucx_util.h"

namespace deltamesh {
namespace {

bool SameHost(const sockaddr* a, const sockaddr* b) {
  if (a == nullptr || a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  }
  return a->sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, sizeof(in6_addr)) == 0;
}

bool IsAny(const sockaddr* a) {
  if (a->sa_family == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr == INADDR_ANY;
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr);
}

bool IsLoopback(const sockaddr* a) {
  if (a->sa_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr) >> 24 == 127;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr);
}

// Whether UCX would listen at it: an interface's first such address of the wanted family is its own.
bool IsUsable(const ifaddrs& interface, int family) {
  if (interface.ifa_addr == nullptr || interface.ifa_addr->sa_family != family) return false;
  if (family == AF_INET) return true;
  const auto& v6 = reinterpret_cast<const sockaddr_in6*>(interface.ifa_addr)->sin6_addr;
  return family == AF_INET6 && !IN6_IS_ADDR_LOOPBACK(&v6) && !IN6_IS_ADDR_LINKLOCAL(&v6);
}

// The interface that has the address `host`; empty for a wildcard.
absl::StatusOr<std::string> InterfaceOf(const std::string& host) {
  ASSIGN_OR_RETURN(const SocketAddress wanted, ParseSocketAddress(FormatSocketAddress(host, 1)));
  if (IsAny(wanted.get())) return "";
  if (IsLoopback(wanted.get()) && wanted.get()->sa_family == AF_INET6) return "lo";
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return Unavailable("network interfaces cannot be listed");
  std::string name;
  for (const ifaddrs* i = all; i != nullptr && name.empty(); i = i->ifa_next) {
    if (SameHost(i->ifa_addr, wanted.get())) name = i->ifa_name;
  }
  bool first = false;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (name != i->ifa_name || !IsUsable(*i, wanted.get()->sa_family)) continue;
    first = SameHost(i->ifa_addr, wanted.get());
    break;
  }
  freeifaddrs(all);
  if (name.empty()) {
    return InvalidArgument("host: no interface here has the address %s; give one of this machine's",
                           host);
  }
  if (!first) {
    return InvalidArgument(
        "host: UCX uses the first address of interface %s, which is not %s; give "
        "the first",
        name, host);
  }
  return name;
}

}  // namespace

absl::Status ApplyUcxDefaults(const UcxTransportOptions& options) {
  std::string devices = options.devices;
  if (devices.empty()) {
    // A wildcard address is bound everywhere, but data stays on the interface that others are told of.
    const bool named = !options.advertise_host.empty();
    ASSIGN_OR_RETURN(devices, InterfaceOf(named ? options.advertise_host : options.host));
  }
  const std::string& named = options.advertise_host.empty() ? options.host : options.advertise_host;
  // By itself UCX takes an interface's IPv4 address where it has one, and of loopback no other.
  const bool v6 = named.find(':') != std::string::npos && named != "::1" && named != "::";
  // UCX_HANDLE_ERRORS and UCX_MEM_EVENTS are read when the library loads: only the real environment
  // sets them.
  const std::pair<const char*, std::string> defaults[] = {
      {"UCX_TLS", options.transports},
      {"UCX_NET_DEVICES", devices},  // left to itself an endpoint stripes over all interfaces
      {"UCX_TCP_AF_PRIO", v6 ? "inet6,inet" : ""},
      {"UCX_TCP_TX_SEG_SIZE", "256K"},  // the 8K default costs most of the bandwidth
      {"UCX_TCP_RX_SEG_SIZE",
       "512K"},                  // a message that does not fit what is left of it is moved first
      {"UCX_TCP_CONN_NB", "y"},  // a connect to a host that is down must not hold up the others
      {"UCX_KEEPALIVE_INTERVAL", "500ms"},
      {"UCX_TCP_KEEPIDLE", "1s"},
      {"UCX_TCP_KEEPINTVL", "1s"},
      {"UCX_TCP_KEEPCNT", "3"},
  };
  for (const auto& [name, value] : defaults) {
    if (value.empty()) continue;
    if (setenv(name, value.c_str(), 0) != 0) return Internal("environment: cannot set %s", name);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
