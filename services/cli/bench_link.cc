#include "services/cli/bench_link.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "runtime/base/status.h"
#include "services/cli/bench_rows.h"
#include "services/cli/piped_child.h"

extern char** environ;

namespace deltamesh {
namespace {

constexpr absl::Duration kLongest = absl::Seconds(20);

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

sockaddr_in Loopback() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// The port of a socket bound to any free one.
absl::StatusOr<int> Bind(const Socket& socket) {
  sockaddr_in address = Loopback();
  socklen_t size = sizeof(address);
  if (socket.fd() < 0 || bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return Unavailable("tcp: no port on loopback (%s)", std::strerror(errno));
  }
  return ntohs(address.sin_port);
}

void Bound(int fd) {
  const timeval limit{.tv_sec = absl::ToInt64Seconds(kLongest), .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

// The variables of this process without what it set for its own UCX.
std::vector<std::string> PerftestEnvironment() {
  std::vector<std::string> out = {"UCX_TLS=tcp", "UCX_NET_DEVICES=lo", "UCX_LOG_LEVEL=error",
                                  "UCX_WARN_UNUSED_ENV_VARS=n"};
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!std::string_view(*variable).starts_with("UCX_")) out.emplace_back(*variable);
  }
  return out;
}

// The overall bandwidth of ucx_perftest's last line of values:
// iterations, percentile, average and overall latency [us], average and overall bandwidth [MiB/s], ...
absl::StatusOr<double> ParsePerftest(const std::string& text) {
  std::istringstream lines(text);
  double rate = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string field;
    for (int i = 0; i < 6 && std::getline(fields, field, ','); ++i) {
      if (i == 5) rate = std::atof(field.c_str()) * (1 << 20);
    }
  }
  if (rate <= 0) {
    return Unavailable("ucx_perftest: no bandwidth in \"%s\"", text.substr(0, 200));
  }
  return rate;
}

absl::StatusOr<double> Perftest(int64_t message_bytes, int64_t count) {
  int port = 0;
  {
    const Socket probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSIGN_OR_RETURN(port, Bind(probe));
  }
  const std::string at = std::to_string(port);
  const std::vector<std::string> environment = PerftestEnvironment();
  ASSIGN_OR_RETURN(const auto server,
                   RunningProgram::Start({{"ucx_perftest", "-p", at}, environment}));
  // It listens a moment after it started; a client that comes early ends at once.
  for (const absl::Time until = absl::Now() + kLongest;;) {
    ASSIGN_OR_RETURN(const auto client,
                     RunningProgram::Start({{"ucx_perftest", "127.0.0.1", "-p", at, "-t",
                                             "ucp_am_bw", "-s", std::to_string(message_bytes), "-n",
                                             std::to_string(count), "-w", "2", "-f", "-v"},
                                            environment}));
    ASSIGN_OR_RETURN(const std::string text, client->Wait(kLongest));
    absl::StatusOr<double> rate = ParsePerftest(text);
    if (rate.ok() || absl::Now() >= until) return rate;
    absl::SleepFor(absl::Milliseconds(20));
  }
}

}  // namespace

absl::StatusOr<LinkRate> MeasureTcp(int64_t message_bytes, int64_t bytes) {
  const Socket listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSIGN_OR_RETURN(const int port, Bind(listener));
  const Socket out(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = Loopback();
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (listen(listener.fd(), 1) != 0 || out.fd() < 0 ||
      connect(out.fd(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return Unavailable("tcp: loopback cannot be reached (%s)", std::strerror(errno));
  }
  const Socket in(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  Bound(out.fd());
  Bound(in.fd());
  const auto size = static_cast<size_t>(message_bytes);
  const auto copies = static_cast<size_t>(std::max<int64_t>(1, bytes / message_bytes));
  std::vector<std::byte> source(size, std::byte{1}), target(size);
  size_t received = 0;
  const double start = BenchSeconds();
  std::thread reader([&] {
    while (received < copies * size) {
      const size_t at = received % size;
      const ssize_t n = recv(in.fd(), target.data() + at, size - at, 0);
      if (n <= 0) return;
      received += static_cast<size_t>(n);
    }
  });
  for (size_t sent = 0; sent < copies * size;) {
    const size_t at = sent % size;
    const ssize_t n = send(out.fd(), source.data() + at, size - at, MSG_NOSIGNAL);
    if (n <= 0) break;
    sent += static_cast<size_t>(n);
  }
  shutdown(out.fd(), SHUT_WR);
  reader.join();
  if (received < copies * size) return Unavailable("tcp: loopback broke after %d bytes", received);
  return LinkRate{"a TCP connection", static_cast<double>(received) / (BenchSeconds() - start)};
}

absl::StatusOr<LinkRate> MeasureLink(int64_t message_bytes, int64_t bytes) {
  const int64_t count = std::max<int64_t>(4, bytes / message_bytes);
  const absl::StatusOr<double> rate = Perftest(message_bytes, count);
  if (rate.ok()) return LinkRate{"ucx_perftest ucp_am_bw", *rate};
  if (!absl::IsNotFound(rate.status())) return rate.status();
  return MeasureTcp(message_bytes, bytes);
}

}  // namespace deltamesh
