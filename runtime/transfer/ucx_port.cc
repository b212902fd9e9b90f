#include "runtime/transfer/ucx_port.h"

#include <dirent.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/transfer/ucx_util.h"

namespace deltamesh {
namespace {

constexpr uint64_t kGreetingBytes = 8;  // UCX's own, at the start of every connection
constexpr uint8_t kEstablished = 1;     // of tcp_info; the kernel's header has no name for it

struct Stranger {
  int fd;
  uint32_t quiet_ms;
};

std::vector<int> OpenFiles() {
  std::vector<int> files;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return files;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] != '.') files.push_back(std::atoi(entry->d_name));
  }
  closedir(folder);
  return files;
}

bool IsAtPort(int fd, int port) {
  sockaddr_storage local{};
  socklen_t length = sizeof(local);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
         (local.ss_family == AF_INET || local.ss_family == AF_INET6) && PortOf(local) == port;
}

bool Listens(int fd) {
  int yes = 0;
  socklen_t length = sizeof(yes);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &yes, &length) == 0 && yes != 0;
}

}  // namespace

absl::StatusOr<int> FindFreePort(const std::string& host, int port) {
  const std::string wanted = FormatSocketAddress(host, port);
  ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(wanted));
  const int fd = socket(address.get()->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  SocketAddress bound;
  bound.length = sizeof(bound.storage);
  const bool free =
      fd >= 0 && bind(fd, address.get(), address.length) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!free) return Unavailable("transport: listening at %s: %s", wanted, std::strerror(error));
  return PortOf(bound.storage);
}

void RaiseFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);  // what is there already will do otherwise
}

StrangerSweep CutStrangers(int port, absl::Duration silence, int64_t most) {
  StrangerSweep sweep;
  std::vector<Stranger> silent;
  for (const int fd : OpenFiles()) {
    if (!IsAtPort(fd, port)) continue;
    if (Listens(fd)) {
      sweep.listening = true;
      continue;
    }
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    if (info.tcpi_state == kEstablished && info.tcpi_bytes_received < kGreetingBytes)
      silent.push_back({fd, info.tcpi_last_data_recv});
  }
  std::sort(silent.begin(), silent.end(),
            [](const Stranger& a, const Stranger& b) { return a.quiet_ms > b.quiet_ms; });
  const auto beyond = std::max<int64_t>(0, static_cast<int64_t>(silent.size()) - most);
  for (const Stranger& stranger : silent) {
    if (sweep.cut >= beyond && absl::Milliseconds(stranger.quiet_ms) < silence) break;
    // UCX sees the end of the stream and frees its side; the descriptor stays its own until then.
    shutdown(stranger.fd, SHUT_RDWR);
    ++sweep.cut;
  }
  sweep.silent = static_cast<int64_t>(silent.size()) - sweep.cut;
  return sweep;
}

}  // namespace deltamesh
