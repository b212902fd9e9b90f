// A port scan of UCX's tcp port while transfers run: nothing that strangers send, or do not send, may end
// the process or change what arrives.

#include <dirent.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "runtime/base/random.h"
#include "runtime/transfer/ucx_address.h"
#include "runtime/transfer/ucx_util.h"
#include "tests/unit/transfer/ucx_ends.h"

namespace deltamesh {
namespace {

class Socket {
 public:
  explicit Socket(int port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    const SocketAddress at = *ParseSocketAddress(FormatSocketAddress("127.0.0.1", port));
    CHECK(connect(fd_, at.get(), at.length) == 0, "connect to port %d", port);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  void Write(std::string_view bytes) const {
    const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    (void)sent;  // a closed connection is what some tests wait for
  }
  // True when the other side has closed within `seconds`.
  bool Ends(double seconds) const {
    const auto start = steady_clock::now();
    char c;
    while (Since(start) < seconds) {
      const ssize_t n = recv(fd_, &c, 1, MSG_DONTWAIT);
      if (n == 0 || (n < 0 && errno != EAGAIN)) return true;
      usleep(5000);
    }
    return false;
  }

 private:
  int fd_;
};

std::string RandomBytes(SeededEntropy& random, size_t size) {
  std::string bytes;
  for (size_t i = 0; i < size; ++i) bytes += static_cast<char>(random.Next());
  return bytes;
}

// Sends large payloads to an echoing process and compares what comes back, until stopped.
class Traffic {
 public:
  explicit Traffic(const std::string& address)
      : peer_(*end_.transport->Connect(address)), thread_([this] { Run(); }) {}
  ~Traffic() { Stop(); }
  int Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return rounds_;
  }
  int rounds() const { return rounds_; }

 private:
  void Run() {
    for (uint32_t salt = 0; !stop_; ++salt) {
      const std::vector<std::byte> payload = Pattern((2 << 20) + salt, salt);
      end_.transport->Send(peer_, MessageType::kProbe, std::to_string(salt), payload,
                           end_.recorder.Count());
      ASSERT_TRUE(end_.recorder.Wait(
          20, [&](const Recorder& r) { return r.messages_.size() == 1 && r.sent_.size() == 1; }));
      ASSERT_TRUE(end_.recorder.sent_[0].ok()) << end_.recorder.sent_[0];
      ASSERT_TRUE(end_.recorder.messages_[0].payload == payload) << "round " << salt;
      end_.recorder.sent_.clear();
      end_.recorder.messages_.clear();
      ++rounds_;
    }
  }

  End end_;
  PeerId peer_;
  std::atomic<bool> stop_{false};
  std::atomic<int> rounds_{0};
  std::thread thread_;
};

// More rounds of `traffic` end well.
void ExpectGoesOn(const Traffic& traffic) {
  const int before = traffic.rounds();
  const auto start = steady_clock::now();
  while (traffic.rounds() < before + 2 && Since(start) < 20) usleep(5000);
  EXPECT_GE(traffic.rounds(), before + 2);
}

class UcxScanTest : public ::testing::Test {
 protected:
  Child child_{"echo", ""};
  const std::string address_ = child_.ReadLine();
  const int port_ = PortOf(ParseSocketAddress(ParseUcxAddress(address_)->host_port)->storage);
  Traffic traffic_{address_};
};

TEST_F(UcxScanTest, BytesThatAreNotUcxCloseThatConnectionOnly) {
  SeededEntropy random(7);
  ExpectGoesOn(traffic_);
  for (const size_t size : {1, 7, 8, 9, 24, 100, 4096, 300000}) {
    const Socket socket(port_);
    socket.Write(RandomBytes(random, size));
    if (size >= 8) {
      EXPECT_TRUE(socket.Ends(5)) << size;
    }
  }
  for (const char* text : {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "SSH-2.0-scan\r\n",
                           "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"}) {
    const Socket socket(port_);
    socket.Write(text);
    EXPECT_TRUE(socket.Ends(5)) << text;
  }
  for (const size_t zeros : {8, 24, 65536}) {
    const Socket socket(port_);
    socket.Write(std::string(zeros, '\0'));
    EXPECT_TRUE(socket.Ends(5)) << zeros;
  }
  for (int i = 0; i < 50; ++i) Socket closed_at_once(port_);
  ExpectGoesOn(traffic_);
  traffic_.Stop();
  EXPECT_EQ(child_.End(), 0);
}

TEST_F(UcxScanTest, SilentConnectionsAreCutAndTransfersGoOn) {
  ExpectGoesOn(traffic_);
  const Socket half_open(port_);
  half_open.Write("\x78\x56\x34");  // the first bytes of UCX's own greeting
  std::vector<Socket> idle;
  for (int i = 0; i < 100; ++i) idle.emplace_back(port_);
  ExpectGoesOn(traffic_);
  const auto start = steady_clock::now();
  EXPECT_TRUE(half_open.Ends(10));
  for (const Socket& socket : idle) EXPECT_TRUE(socket.Ends(std::max(0.1, 10 - Since(start))));
  ExpectGoesOn(traffic_);
  EXPECT_GT(traffic_.Stop(), 0);
  EXPECT_EQ(child_.End(), 0);
}

TEST(UcxStrangersTest, BeyondTheBoundTheOldestAreCutAtOnceAndCounted) {
  UcxTransportOptions options = LoopbackOptions();
  options.strangers_max = 10;
  options.stranger_silence = absl::Hours(1);
  End end(options);
  std::vector<Socket> idle;
  for (int i = 0; i < 30; ++i) {
    idle.emplace_back(end.transport->port());
    if (i == 19) usleep(50000);
  }
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(idle[static_cast<size_t>(i)].Ends(5)) << i;
  for (size_t i = 20; i < 30; ++i) EXPECT_FALSE(idle[i].Ends(0.02)) << i;
  EXPECT_EQ(end.transport->stats().refused, 20u);
  // The transport's own connections are none of them.
  End other;
  const PeerId peer = *other.transport->Connect(end.transport->address());
  other.transport->Send(peer, MessageType::kProbe, "x", {}, other.recorder.Count());
  ASSERT_TRUE(end.recorder.Wait(5, [](const Recorder& r) { return r.messages_.size() == 1; }));
  sleep(2);
  EXPECT_TRUE(other.recorder.lost_.empty());
}

}  // namespace
}  // namespace deltamesh
