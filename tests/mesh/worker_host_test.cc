// The process around a core: ports open, loading, taken down again, and the end of a drain.
#include "services/worker/worker_host.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <utility>

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

// Moved by the core below, so that a drain passes without waiting for it.
class SteppedClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::FromUnixNanos(now_ns_); }
  void Advance(absl::Duration d) { now_ns_ += absl::ToInt64Nanoseconds(d); }

 private:
  std::atomic<int64_t> now_ns_ = int64_t{1} << 60;
};

// Holds a request when the process is told to end, and works on it for a second of its clock.
class BusyCore final : public WorkerCore {
 public:
  explicit BusyCore(SteppedClock* clock) : clock_(clock) {}

  void OnLinkOpened(LinkId, absl::Time) override {}
  void OnLinkClosed(LinkId, absl::Time) override {}
  void OnRouterMessage(LinkId, const mesh::RouterMessage&, absl::Time) override {}
  bool Step(absl::Time) override {
    clock_->Advance(absl::Milliseconds(20));
    if (!std::exchange(asked_to_end_, true)) kill(getpid(), SIGTERM);
    if (!draining_ || steps_left_ == 0) return false;
    if (--steps_left_ == 0) last_work_ = clock_->Now();
    return true;
  }
  void Tick(absl::Time) override {}
  std::vector<SendToRouter> TakeActions() override { return {}; }
  void Drain(absl::Time) override { draining_ = true; }
  bool Idle() const override { return steps_left_ == 0; }
  bool Registered() const override { return true; }
  std::vector<MetricSample> Metrics() const override { return {}; }

  absl::Time last_work() const { return last_work_; }

 private:
  SteppedClock* const clock_;
  bool asked_to_end_ = false, draining_ = false;
  int steps_left_ = 50;
  absl::Time last_work_;
};

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

// Routers get as long to hear of the end of a long drain as of a short one.
TEST(WorkerHost, LingersAfterTheLastWorkOfADrain) {
  const SignalWaiter signals;
  SteppedClock clock;
  BusyCore core(&clock);
  WorkerHostOptions options;
  options.role = "decode";
  options.flags.name = "w";
  auto host = WorkerHost::Start(options, &signals, &clock);
  ASSERT_TRUE(host.ok()) << host.status();
  WorkerHost::Role role;
  role.core = &core;
  EXPECT_EQ((*host)->Run(role), 0);
  EXPECT_TRUE(core.Idle());
  EXPECT_GT(clock.Now() - core.last_work(), options.linger);
}

}  // namespace
}  // namespace deltamesh
