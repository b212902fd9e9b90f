// UCX over loopback: two transports in this process, and a second process that can be killed.

#include "runtime/transfer/ucx_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "runtime/base/crc32c.h"
#include "runtime/transfer/ucx_util.h"
#include "tests/unit/transfer/ucx_ends.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

TEST(UcxUtilTest, Addresses) {
  EXPECT_TRUE(ParseSocketAddress("127.0.0.1:9000").ok());
  EXPECT_TRUE(ParseSocketAddress("[::1]:9000").ok());
  EXPECT_EQ(PortOf(ParseSocketAddress("[::1]:9000")->storage), 9000);
  EXPECT_EQ(FormatSocketAddress("::1", 5), "[::1]:5");
  for (const char* bad :
       {"", "127.0.0.1", "127.0.0.1:", ":80", "localhost:80", "1.2.3.4:http", "[::1:80"}) {
    EXPECT_EQ(ParseSocketAddress(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(UcxUtilTest, LanesAreReadFromTheEndpointsDescription) {
  EXPECT_EQ(LanesOf("#   lane[0]:  2:tcp/lo.0 md[1] -> md[1]/tcp am\n#   lane[1]: 0:posix/memory.0 "
                    "md[0] -> x\n"),
            "posix/memory tcp/lo");
  EXPECT_EQ(LanesOf(""), "");
}

TEST(UcxEnvironmentTest, DefaultsNameTheInterfaceAndRespectWhatIsSet) {
  UcxTransportOptions options;
  options.host = "203.0.113.77";  // nobody's
  EXPECT_EQ(ApplyUcxDefaults(options).code(), absl::StatusCode::kInvalidArgument);
  setenv("UCX_TCP_KEEPCNT", "7", 1);
  ASSERT_TRUE(ApplyUcxDefaults(LoopbackOptions()).ok());
  EXPECT_STREQ(getenv("UCX_NET_DEVICES"), "lo");
  EXPECT_STREQ(getenv("UCX_TLS"), "tcp");
  EXPECT_STREQ(getenv("UCX_TCP_KEEPCNT"), "7");
}

TEST(UcxTransportTest, PayloadsOfEverySizeArriveAsSent) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  const size_t sizes[] = {
      0,     1,     3,     63,         64,      4095,          4096,           8191,
      65535, 65536, 65537, 262144 + 1, 1 << 20, (4 << 20) + 7, (16 << 20) - 1, 64 << 20};
  for (const size_t size : sizes) {
    SCOPED_TRACE(size);
    const std::vector<std::byte> payload = Pattern(size, static_cast<uint32_t>(size));
    const std::string header = absl::StrFormat("size %d", size);
    a.transport->Send(peer, MessageType::kProbe, header, payload, a.recorder.Count());
    ASSERT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; }));
    const Recorded got = std::move(b.recorder.messages_[0]);
    b.recorder.messages_.clear();
    EXPECT_TRUE(got.status.ok()) << got.status;
    EXPECT_EQ(got.header, header);
    EXPECT_EQ(got.type, MessageType::kProbe);
    EXPECT_TRUE(got.payload == payload);
    ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 1; }));
    EXPECT_TRUE(a.recorder.sent_[0].ok());
    a.recorder.sent_.clear();
  }
  EXPECT_EQ(a.transport->stats().messages_sent, std::size(sizes));
  EXPECT_EQ(b.transport->stats().messages_received, std::size(sizes));
  EXPECT_EQ(a.transport->stats().bytes_sent, b.transport->stats().bytes_received);
  EXPECT_EQ(b.transport->lanes(), "tcp/lo");
}

// Eager and by rendezvous: what has another checksum than was announced is told, and spoils nothing else.
TEST(UcxTransportTest, AnAnnouncedChecksumIsChecked) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  for (const size_t size : {1u, 1000u, 65535u, 65536u, 1u << 20}) {
    const std::vector<std::byte> good = Pattern(size, 7);
    std::vector<std::byte> bad = good;
    bad[size / 2] ^= std::byte{4};
    b.recorder.crc32c_ = Crc32c(good);
    for (const auto* payload : {&std::as_const(bad), &good}) {
      SCOPED_TRACE(absl::StrFormat("%d bytes, %s", size, payload == &good ? "right" : "wrong"));
      a.transport->Send(peer, MessageType::kProbe, "", *payload, a.recorder.Count());
      ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 1; }));
      a.recorder.sent_.clear();
      ASSERT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; }));
      const Recorded got = std::move(b.recorder.messages_[0]);
      b.recorder.messages_.clear();
      EXPECT_EQ(absl::IsDataLoss(got.status), payload == &bad) << got.status;
      EXPECT_EQ(got.status.ok() && got.payload == good, payload == &good);
    }
  }
}

TEST(UcxTransportTest, AnswersGoBackOnTheSameConnection) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  a.transport->Send(peer, MessageType::kProbe, "question", {}, a.recorder.Count());
  ASSERT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; }));
  const std::vector<std::byte> answer = Pattern(1 << 20, 5);
  b.transport->Send(b.recorder.messages_[0].peer, MessageType::kProbe, "answer", answer,
                    b.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; }));
  EXPECT_EQ(a.recorder.messages_[0].peer, peer);
  EXPECT_EQ(a.recorder.messages_[0].header, "answer");
  EXPECT_TRUE(a.recorder.messages_[0].payload == answer);
  EXPECT_EQ(a.transport->stats().peers, 1u);
  EXPECT_EQ(b.transport->stats().peers, 1u);
}

TEST(UcxTransportTest, AThousandSmallMessages) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  for (int i = 0; i < 1000; ++i) {
    a.transport->Send(peer, MessageType::kProbe, std::to_string(i), {}, a.recorder.Count());
  }
  ASSERT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1000; }));
  std::set<std::string> seen;
  for (const Recorded& message : b.recorder.messages_) seen.insert(message.header);
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 1000; }));
}

TEST(UcxTransportTest, HeadersUpToTheLimit) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  const std::string header(kHeaderBytesMax, 'h');
  const std::vector<std::byte> payload = Pattern(100000, 3);
  a.transport->Send(peer, MessageType::kProbe, header, payload, a.recorder.Count());
  a.transport->Send(peer, MessageType::kProbe, header, {}, a.recorder.Count());
  a.transport->Send(peer, MessageType::kProbe, header + "x", {}, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 3; }));
  ASSERT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 2; }));
  for (const Recorded& message : b.recorder.messages_) EXPECT_TRUE(message.header == header);
  int refused = 0;
  for (const absl::Status& status : a.recorder.sent_)
    refused += status.code() == absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(refused, 1);
}

TEST(UcxTransportTest, UnknownTypesAndRefusedPayloadsAreDroppedAndCounted) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  const std::vector<std::byte> payload = Pattern(1 << 20, 4);
  a.transport->Send(peer, MessageType::kExpertDispatch, "no handler", payload, a.recorder.Count());
  a.transport->Send(peer, static_cast<MessageType>(900), "no such type", {}, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 2; }));
  b.recorder.Refuse(true);
  a.transport->Send(peer, MessageType::kProbe, "refused", payload, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 3; }));
  b.recorder.Refuse(false);
  a.transport->Send(peer, MessageType::kProbe, "taken", payload, a.recorder.Count());
  ASSERT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; }));
  EXPECT_EQ(b.recorder.messages_[0].header, "taken");
  EXPECT_EQ(b.transport->stats().dropped, 3u);
}

TEST(UcxTransportTest, ConnectingToNobodyIsReported) {
  std::string nobody;
  {
    End gone;
    nobody = gone.transport->address();
  }
  End a;
  const auto start = steady_clock::now();
  const PeerId peer = *a.transport->Connect(nobody);
  a.transport->Send(peer, MessageType::kProbe, "x", {}, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(
      2, [](const Recorder& r) { return r.lost_.size() == 1 && r.sent_.size() == 1; }));
  EXPECT_LT(Since(start), 2.0);
  EXPECT_EQ(a.recorder.lost_[0].first, peer);
  EXPECT_EQ(a.recorder.sent_[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(a.transport->stats().peers, 0u);
  EXPECT_EQ(a.transport->Connect("nowhere").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(a.transport->Connect(a.transport->address()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(UcxTransportTest, SendsToUnknownPeersFail) {
  End a;
  a.transport->Send(77, MessageType::kProbe, "x", {}, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(2, [](const Recorder& r) { return r.sent_.size() == 1; }));
  EXPECT_EQ(a.recorder.sent_[0].code(), absl::StatusCode::kUnavailable);
  a.transport->Disconnect(77);
}

TEST(UcxTransportTest, DisconnectCancelsWhatIsInFlight) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  const std::vector<std::byte> payload = Pattern(128 << 20, 6);
  b.recorder.on_payload_ = [&](PeerId) { a.transport->Disconnect(peer); };
  a.transport->Send(peer, MessageType::kProbe, "big", payload, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 1; }));
  EXPECT_EQ(a.recorder.sent_[0].code(), absl::StatusCode::kCancelled);
  ASSERT_TRUE(b.recorder.Wait(
      2, [](const Recorder& r) { return r.messages_.size() == 1 && r.lost_.size() == 1; }));
  EXPECT_EQ(b.recorder.messages_[0].status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(a.recorder.lost_.empty()) << "this side asked for it";
}

TEST(UcxTransportTest, TheReceiverMayDisconnectToo) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  const std::vector<std::byte> payload = Pattern(128 << 20, 6);
  a.transport->Send(peer, MessageType::kProbe, "hello", {}, a.recorder.Count());
  ASSERT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; }));
  b.recorder.on_payload_ = [&](PeerId back) { b.transport->Disconnect(back); };
  a.transport->Send(peer, MessageType::kProbe, "big", payload, a.recorder.Count());
  ASSERT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 2; }));
  EXPECT_EQ(b.recorder.messages_[1].status.code(), absl::StatusCode::kCancelled);
  ASSERT_TRUE(a.recorder.Wait(
      2, [](const Recorder& r) { return r.sent_.size() == 2 && r.lost_.size() == 1; }));
  // Sent is not received: the sender may have been rid of all bytes before it heard of the end.
  EXPECT_TRUE(a.recorder.sent_[1].ok() || absl::IsUnavailable(a.recorder.sent_[1]))
      << a.recorder.sent_[1];
}

// A handler runs within a look into UCX.
void ReceiveAndNeverComeBack() {
  UcxTransportOptions options = LoopbackOptions();
  options.hung_after = absl::Milliseconds(300);
  End a, b(options);
  const std::vector<std::byte> payload = Pattern(1000, 1);
  b.recorder.on_payload_ = [](PeerId) { pause(); };
  const PeerId peer = *a.transport->Connect(b.transport->address());
  a.transport->Send(peer, MessageType::kProbe, "x", payload, a.recorder.Count());
  sleep(20);
}

TEST(UcxTransportDeathTest, ALookIntoUcxThatNeverReturnsEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(ReceiveAndNeverComeBack(), "UCX has not come back for 300ms");
}

TEST(UcxTransportTest, ASlowLookIsLeftAlone) {
  UcxTransportOptions options = LoopbackOptions();
  options.hung_after = absl::Seconds(2);
  End a, b(options);
  const std::vector<std::byte> payload = Pattern(1000, 1);
  b.recorder.on_payload_ = [](PeerId) { usleep(300'000); };
  const PeerId peer = *a.transport->Connect(b.transport->address());
  for (int i = 0; i < 2; ++i) {
    a.transport->Send(peer, MessageType::kProbe, "x", payload, a.recorder.Count());
  }
  EXPECT_TRUE(b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 2; }));
}

TEST(UcxTransportTest, OneThatRestartsIsReachedAtItsNewAddress) {
  End a;
  for (int life = 0; life < 3; ++life) {
    End b;
    const PeerId peer = *a.transport->Connect(b.transport->address());
    a.transport->Send(peer, MessageType::kProbe, "x", {}, a.recorder.Count());
    ASSERT_TRUE(b.recorder.Wait(5, [](const Recorder& r) { return r.messages_.size() == 1; }))
        << life;
  }
  ASSERT_TRUE(a.recorder.Wait(5, [](const Recorder& r) { return r.lost_.size() == 3; }));
}

TEST(UcxTransportTest, APortInUseIsAClearError) {
  End a;
  UcxTransportOptions options = LoopbackOptions(a.transport->port());
  const auto second = UcxTransport::Create(options);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(MessageOf(second.status()),
              HasSubstr(FormatSocketAddress("127.0.0.1", a.transport->port())));
}

TEST(UcxTransportTest, ARangeOfPortsGivesTheFirstFreeOne) {
  End a;
  UcxTransportOptions options = LoopbackOptions(a.transport->port());
  options.port_last = options.port + 8;
  const End b(options);
  EXPECT_GT(b.transport->port(), options.port);
  EXPECT_LE(b.transport->port(), options.port_last);
}

TEST(UcxTransportTest, LimitsOnPeersAndSends) {
  UcxTransportOptions options = LoopbackOptions();
  options.peers_max = 1;
  options.sends_max = 2;
  End a(options), b, c;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  const std::vector<std::byte> payload = Pattern(32 << 20, 6);
  for (int i = 0; i < 4; ++i)
    a.transport->Send(peer, MessageType::kProbe, "x", payload, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 4; }));
  int refused = 0;
  for (const absl::Status& status : a.recorder.sent_)
    refused += status.code() == absl::StatusCode::kResourceExhausted;
  EXPECT_EQ(refused, 2);
  EXPECT_EQ(a.transport->Connect(c.transport->address()).status().code(),
            absl::StatusCode::kResourceExhausted);
  // An incoming connection beyond the limit is refused as well.
  const PeerId over = *c.transport->Connect(a.transport->address());
  c.transport->Send(over, MessageType::kProbe, "x", {}, c.recorder.Count());
  ASSERT_TRUE(c.recorder.Wait(5, [](const Recorder& r) { return r.lost_.size() == 1; }));
}

TEST(UcxTransportTest, ClosingWithTrafficUnderWayEndsEverySendOnce) {
  for (int round = 0; round < 5; ++round) {
    auto a = std::make_unique<End>();
    End b;
    const PeerId peer = *a->transport->Connect(b.transport->address());
    const std::vector<std::byte> payload = Pattern(8 << 20, 6);
    for (int i = 0; i < 20; ++i)
      a->transport->Send(peer, MessageType::kProbe, "x", payload, a->recorder.Count());
    b.recorder.Wait(5, [&](const Recorder& r) { return r.started_ > round; });
    const auto start = steady_clock::now();
    a->transport.reset();
    EXPECT_LT(Since(start), 2.5);
    EXPECT_EQ(a->recorder.sent_.size(), 20u);
  }
}

TEST(UcxTransportTest, AnIdleTransportSleeps) {
  End a, b;
  const PeerId peer = *a.transport->Connect(b.transport->address());
  a.transport->Send(peer, MessageType::kProbe, "x", {}, a.recorder.Count());
  ASSERT_TRUE(b.recorder.Wait(5, [](const Recorder& r) { return r.messages_.size() == 1; }));
  const clock_t before = clock();
  usleep(500000);
  EXPECT_LT(static_cast<double>(clock() - before) / CLOCKS_PER_SEC, 0.05);
}

// Sends from another thread meet the own thread awake, about to sleep and asleep; none of that may leave a
// mark that wakes it for ever.
TEST(UcxTransportTest, OneThatWasBusySleepsAgain) {
  UcxTransportOptions options = LoopbackOptions();
  options.spin = absl::Microseconds(50);
  const std::unique_ptr<UcxTransport> a = OpenLoopback(options);
  for (int round = 0; round < 10; ++round) {
    std::atomic<int> ended{0};
    constexpr int kSends = 5000;
    const PeerId nobody = 999;
    for (int i = 0; i < kSends; ++i) {
      a->Send(nobody, MessageType::kProbe, "x", {}, [&](const absl::Status&) { ++ended; });
      for (volatile int wait = 0; wait < i % 97 * 20; wait = wait + 1) {
      }
    }
    while (ended < kSends) usleep(100);
    usleep(20000);
    const clock_t before = clock();
    usleep(100000);
    EXPECT_LT(static_cast<double>(clock() - before) / CLOCKS_PER_SEC, 0.05) << round;
  }
}

TEST(UcxProcessTest, EchoThroughASecondProcess) {
  End a;
  Child child("echo", "");
  const PeerId peer = *a.transport->Connect(child.ReadLine());
  for (const size_t size : {size_t{0}, size_t{1000}, size_t{(1 << 20) + 3}, size_t{64 << 20}}) {
    SCOPED_TRACE(size);
    const std::vector<std::byte> payload = Pattern(size, 8);
    a.transport->Send(peer, MessageType::kProbe, "ping", payload, a.recorder.Count());
    ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; }));
    EXPECT_TRUE(a.recorder.messages_[0].payload == payload);
    ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 1; }));
    a.recorder.sent_.clear();
    a.recorder.messages_.clear();
  }
  EXPECT_EQ(child.End(), 0);
}

TEST(UcxProcessTest, AKilledReceiverIsNoticed) {
  End a;
  Child child("sink", "");
  const PeerId peer = *a.transport->Connect(child.ReadLine());
  const std::vector<std::byte> payload = Pattern(64 << 20, 8);
  for (int i = 0; i < 20; ++i)
    a.transport->Send(peer, MessageType::kProbe, "x", payload, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return !r.sent_.empty(); }));
  child.Kill();
  ASSERT_TRUE(a.recorder.Wait(
      2, [](const Recorder& r) { return r.lost_.size() == 1 && r.sent_.size() == 20; }));
  EXPECT_EQ(a.recorder.lost_[0].first, peer);
  EXPECT_EQ(a.recorder.sent_.back().code(), absl::StatusCode::kUnavailable);
  a.transport->Send(peer, MessageType::kProbe, "x", {}, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(2, [](const Recorder& r) { return r.sent_.size() == 21; }));
}

TEST(UcxProcessTest, AKilledSenderFailsThePayloadItWasSending) {
  End a;
  Child child("source", a.transport->address());
  ASSERT_TRUE(a.recorder.Wait(
      10, [](const Recorder& r) { return r.messages_.size() >= 1 && r.started_ >= 2; }));
  child.Kill();
  ASSERT_TRUE(a.recorder.Wait(2, [](const Recorder& r) {
    return r.lost_.size() == 1 && static_cast<int>(r.messages_.size()) == r.started_;
  }));
  for (const Recorded& message : a.recorder.messages_) {
    EXPECT_TRUE(message.status.ok() || message.status.code() == absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(a.transport->stats().peers, 0u);
}

TEST(UcxProcessTest, AnIdlePeerThatDiesIsNoticed) {
  End a;
  Child child("echo", "");
  const PeerId peer = *a.transport->Connect(child.ReadLine());
  a.transport->Send(peer, MessageType::kProbe, "ping", {}, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; }));
  child.Kill();
  ASSERT_TRUE(a.recorder.Wait(2, [](const Recorder& r) { return r.lost_.size() == 1; }));
}

// A hung process is not noticed by UCX; Disconnect must still free everything.
TEST(UcxProcessTest, DisconnectFromAStoppedReceiverReturnsTheMemory) {
  End a;
  Child child("sink", "");
  const PeerId peer = *a.transport->Connect(child.ReadLine());
  a.transport->Send(peer, MessageType::kProbe, "ping", {}, a.recorder.Count());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return r.sent_.size() == 1; }));
  kill(child.pid(), SIGSTOP);
  const std::vector<std::byte> payload = Pattern(64 << 20, 8);
  a.transport->Send(peer, MessageType::kProbe, "x", payload, a.recorder.Count());
  usleep(100000);
  EXPECT_EQ(a.recorder.sent_.size(), 1u);
  a.transport->Disconnect(peer);
  ASSERT_TRUE(a.recorder.Wait(2, [](const Recorder& r) { return r.sent_.size() == 2; }));
  EXPECT_EQ(a.recorder.sent_[1].code(), absl::StatusCode::kCancelled);
}

TEST(UcxProcessTest, DisconnectFromAStoppedSenderReturnsTheBuffer) {
  End a;
  Child child("source", a.transport->address());
  ASSERT_TRUE(a.recorder.Wait(10, [](const Recorder& r) { return !r.messages_.empty(); }));
  kill(child.pid(), SIGSTOP);
  usleep(100000);
  PeerId peer = 0;
  a.recorder.Wait(1, [&](const Recorder& r) {
    peer = r.messages_[0].peer;
    return true;
  });
  a.transport->Disconnect(peer);
  EXPECT_TRUE(a.recorder.Wait(
      2, [](const Recorder& r) { return static_cast<int>(r.messages_.size()) == r.started_; }));
  // A buffer that was given back belongs to somebody else, whatever the sender still does.
  std::vector<std::byte> given_back;
  a.recorder.Wait(1, [&](const Recorder& r) {
    given_back = r.messages_.back().payload;
    return true;
  });
  kill(child.pid(), SIGCONT);
  usleep(300000);
  EXPECT_TRUE(a.recorder.messages_.back().payload == given_back);
}

}  // namespace
}  // namespace deltamesh
