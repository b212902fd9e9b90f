// The process around a core, as far as it goes without a core: ports open, loading, and taken down again.
#include "services/worker/worker_host.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

// One request on a connection of its own; the reply, empty when there was none.
std::string Get(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const timeval limit = {.tv_sec = 5, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string reply;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    char buffer[4096];
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      for (ssize_t n; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
        reply.append(buffer, static_cast<size_t>(n));
      }
    }
  }
  close(fd);
  return reply;
}

int PortOf(const std::string& address) { return std::stoi(address.substr(address.rfind(':') + 1)); }

// What happens when the model cannot be loaded: the host is taken down while someone looks at it. Run it
// under a sanitizer to see a use of what is gone.
TEST(WorkerHost, IsTakenDownWhileScraped) {
  const SignalWaiter signals;
  const SystemClock clock;
  WorkerHostOptions options;
  options.role = "decode";
  options.flags.name = "w";
  for (int round = 0; round < 10; ++round) {
    auto host = WorkerHost::Start(options, &signals, &clock);
    ASSERT_TRUE(host.ok()) << host.status();
    const int port = PortOf((*host)->http_address());
    EXPECT_NE(Get(port, "/metrics").find("200"), std::string::npos);
    EXPECT_NE(Get(port, "/readyz").find("503"), std::string::npos);
    std::atomic<bool> stop = false;
    std::vector<std::thread> scrapers;
    for (int i = 0; i < 4; ++i) {
      scrapers.emplace_back([&] {
        while (!stop) Get(port, "/metrics");
      });
    }
    absl::SleepFor(absl::Milliseconds(5));
    host->reset();
    stop = true;
    for (std::thread& scraper : scrapers) scraper.join();
  }
}

}  // namespace
}  // namespace deltamesh
