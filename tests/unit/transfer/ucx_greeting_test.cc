// How UCX connections open: addresses, greetings that are wrong or meant for another, pairing.

#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "runtime/transfer/ucx_address.h"
#include "runtime/transfer/ucx_util.h"
#include "runtime/transfer/ucx_worker.h"
#include "tests/unit/transfer/ucx_ends.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

constexpr uint16_t kVersion = 2, kHello = 0xff01, kWelcome = 0xff02;

// A process that speaks UCX but not our greetings: what it sends is up to the test.
class Stranger {
 public:
  Stranger() {
    UcxCallbacks callbacks{};
    callbacks.arg = this;
    callbacks.on_message = [](void* self, const void* header, size_t size, void*, size_t,
                              const ucp_am_recv_param_t*) {
      static_cast<Stranger*>(self)->received_.emplace_back(static_cast<const char*>(header), size);
      return UCS_OK;
    };
    worker_ = *UcxWorker::Open(LoopbackOptions(), 1, callbacks);
  }
  ~Stranger() {
    for (const ucp_ep_h ep : open_) Close(ep);
    Progress(0.05);
  }

  ucp_ep_h Connect(const std::string& address) {
    const UcxAddress to = *ParseUcxAddress(address);
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t) {
      ++static_cast<Stranger*>(self)->failures_;
    };
    params.err_handler.arg = this;
    params.address = reinterpret_cast<const ucp_address_t*>(to.worker.data());
    ucp_ep_h ep = nullptr;
    CHECK(ucp_ep_create(worker_->worker(), &params, &ep) == UCS_OK);
    open_.push_back(ep);
    return ep;
  }
  void Send(ucp_ep_h ep, uint16_t version, uint16_t type, std::string_view bytes,
            std::span<const std::byte> payload = {}) {
    auto& message = sent_.emplace_back(std::make_unique<std::string>());
    message->append(reinterpret_cast<const char*>(&version), 2);
    message->append(reinterpret_cast<const char*>(&type), 2);
    message->append(bytes);
    SendRaw(ep, *message, payload);
  }
  void SendRaw(ucp_ep_h ep, std::string_view header, std::span<const std::byte> payload = {}) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_REPLY;
    const ucs_status_ptr_t request = ucp_am_send_nbx(ep, 1, header.data(), header.size(),
                                                     payload.data(), payload.size(), &param);
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
  }
  // As a transport of another process would.
  std::string Hello(const std::string& to) const {
    return EncodeUcxHello(
        {.to = ParseUcxAddress(to)->identity,
         .nonce = RandomHex(16),
         .address = FormatUcxAddress(
             {.identity = identity_, .host_port = "127.0.0.1:1", .worker = worker_->address()})});
  }
  void Close(ucp_ep_h ep) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(ep, &param);
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
  }
  void CloseEarly(ucp_ep_h ep) {
    Close(ep);
    std::erase(open_, ep);
  }
  bool Progress(
      double seconds, const std::function<bool()>& enough = [] { return false; }) {
    const auto start = steady_clock::now();
    while (!enough() && Since(start) < seconds) {
      if (!worker_->Progress(64, enough)) usleep(200);
    }
    return enough();
  }
  bool Welcomed() const {
    for (const std::string& message : received_) {
      uint16_t type = 0;
      std::memcpy(&type, message.data() + 2, 2);
      if (type == kWelcome) return true;
    }
    return false;
  }

  std::vector<std::string> received_;
  int failures_ = 0;

 private:
  const std::string identity_ = RandomHex(32);
  std::unique_ptr<UcxWorker> worker_;
  std::vector<std::unique_ptr<std::string>> sent_;
  std::vector<ucp_ep_h> open_;
};

// That a proper peer can still connect and be heard.
void ExpectServes(End& end) {
  const size_t before = end.recorder.messages_.size();
  End other;
  const PeerId peer = *other.transport->Connect(end.transport->address());
  other.transport->Send(peer, MessageType::kProbe, "proper", {}, other.recorder.Count());
  ASSERT_TRUE(
      end.recorder.Wait(5, [&](const Recorder& r) { return r.messages_.size() == before + 1; }));
}

bool Eventually(const std::function<bool()>& condition, double seconds = 5) {
  for (const auto start = steady_clock::now(); Since(start) < seconds; usleep(2000)) {
    if (condition()) return true;
  }
  return false;
}

int OpenFiles() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST(UcxAddressTest, RoundTripAndEveryDamageIsFound) {
  const UcxAddress address{.identity = RandomHex(32),
                           .host_port = "10.0.0.5:9000",
                           .worker = std::string("\0\xff|\n blob", 9)};
  const std::string text = FormatUcxAddress(address);
  for (const char c : text) EXPECT_TRUE(c > ' ' && c < 127) << "not printable";
  const UcxAddress back = *ParseUcxAddress(text);
  EXPECT_EQ(back.identity, address.identity);
  EXPECT_EQ(back.host_port, address.host_port);
  EXPECT_EQ(back.worker, address.worker);
  for (size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x01);
    EXPECT_FALSE(ParseUcxAddress(damaged).ok()) << i;
    EXPECT_FALSE(ParseUcxAddress(text.substr(0, i)).ok()) << i;
  }
  EXPECT_FALSE(ParseUcxAddress(std::string(1 << 20, '|')).ok());
}

TEST(UcxGreetingTest, MalformedOnesAreRefusedCountedAndClosed) {
  End end;
  const std::string to = end.transport->address();
  Stranger stranger;
  const std::string good = stranger.Hello(to);
  const std::string bad[] = {"", "x", good.substr(0, 40), good.substr(0, good.size() - 1),
                             good + std::string(20 << 10, 'x')};
  uint64_t refused = 0;
  for (const std::string& hello : bad) {
    SCOPED_TRACE(hello.size());
    const int failures = stranger.failures_;
    stranger.Send(stranger.Connect(to), kVersion, kHello, hello);
    ++refused;
    EXPECT_TRUE(stranger.Progress(5, [&] { return stranger.failures_ == failures + 1; }))
        << "its endpoint stayed open";
    EXPECT_TRUE(Eventually([&] { return end.transport->stats().refused == refused; }));
  }
  EXPECT_EQ(end.transport->stats().peers, 0u);
  ExpectServes(end);
}

TEST(UcxGreetingTest, MessagesFromNoConnectionAreRefused) {
  End end;
  const std::string to = end.transport->address();
  Stranger stranger;
  const std::vector<std::byte> large = Pattern(1 << 20, 1);
  const ucp_ep_h ep[4] = {stranger.Connect(to), stranger.Connect(to), stranger.Connect(to),
                          stranger.Connect(to)};
  stranger.Send(ep[0], kVersion, static_cast<uint16_t>(MessageType::kProbe), "no hello");
  stranger.Send(ep[1], kVersion, static_cast<uint16_t>(MessageType::kProbe), "no hello", large);
  stranger.Send(ep[2], 1, static_cast<uint16_t>(MessageType::kProbe), "another version");
  stranger.SendRaw(ep[3], "x");
  EXPECT_TRUE(stranger.Progress(5, [&] { return stranger.failures_ == 4; }));
  EXPECT_EQ(end.transport->stats().refused, 4u);
  EXPECT_EQ(end.recorder.messages_.size(), 0u);
  ExpectServes(end);
}

TEST(UcxGreetingTest, ASecondHelloEndsTheConnection) {
  End end;
  const std::string to = end.transport->address();
  Stranger stranger;
  const ucp_ep_h ep = stranger.Connect(to);
  stranger.Send(ep, kVersion, kHello, stranger.Hello(to));
  ASSERT_TRUE(stranger.Progress(5, [&] { return stranger.Welcomed(); }));
  EXPECT_EQ(end.transport->stats().peers, 1u);
  stranger.Send(ep, kVersion, kHello, stranger.Hello(to));
  EXPECT_TRUE(stranger.Progress(5, [&] { return stranger.failures_ == 1; }));
  EXPECT_TRUE(end.recorder.Wait(2, [](const Recorder& r) { return r.lost_.size() == 1; }));
  EXPECT_EQ(end.transport->stats().peers, 0u);
}

// UCX pairs endpoints by counting, and this one's first never said hello.
TEST(UcxGreetingTest, AHelloPairsAfterEndpointsThatNeverSaidOne) {
  End end;
  const std::string to = end.transport->address();
  Stranger stranger;
  for (int i = 0; i < 3; ++i) {
    const ucp_ep_h silent = stranger.Connect(to);
    stranger.Progress(0.05);
    if (i != 1) stranger.CloseEarly(silent);
  }
  stranger.Progress(0.05);
  stranger.Send(stranger.Connect(to), kVersion, kHello, stranger.Hello(to));
  ASSERT_TRUE(stranger.Progress(5, [&] { return stranger.Welcomed(); }));
  EXPECT_EQ(end.transport->stats().peers, 1u);
}

TEST(UcxGreetingTest, AnAddressOfSomebodyElseThereIsRefused) {
  UcxTransportOptions quick;
  quick.greeting_max = absl::Seconds(1);
  End end, a(quick);
  UcxAddress stale = *ParseUcxAddress(end.transport->address());
  stale.identity = RandomHex(32);
  ASSERT_TRUE(a.transport->Connect(FormatUcxAddress(stale)).ok());
  ASSERT_TRUE(a.recorder.Wait(3, [](const Recorder& r) { return r.lost_.size() == 1; }));
  EXPECT_THAT(MessageOf(a.recorder.lost_[0].second), HasSubstr("turned us away"));
  EXPECT_EQ(end.transport->stats().refused, 1u);
  EXPECT_EQ(end.transport->stats().peers, 0u);
  ExpectServes(end);
}

TEST(UcxGreetingTest, AnAddressWhosePortAnswersNothingEndsWithinTheDeadline) {
  std::string address;
  int port;
  {
    End gone;
    address = gone.transport->address();
    port = gone.transport->port();
  }
  // Takes connections and says nothing; its queue of one is full after a few, so that further ones hang.
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  const int yes = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  const SocketAddress at = *ParseSocketAddress(FormatSocketAddress("127.0.0.1", port));
  ASSERT_EQ(bind(listener, at.get(), at.length), 0);
  ASSERT_EQ(listen(listener, 0), 0);
  UcxTransportOptions quick;
  quick.greeting_max = absl::Milliseconds(700);
  End a(quick), b;
  const PeerId fine = *a.transport->Connect(b.transport->address());
  const auto start = steady_clock::now();
  for (int i = 0; i < 4; ++i) {
    const PeerId peer = *a.transport->Connect(address);
    a.transport->Send(peer, MessageType::kProbe, "x", {}, a.recorder.Count());
  }
  // Meanwhile the others are served.
  a.transport->Send(fine, MessageType::kProbe, "y", {}, a.recorder.Count());
  ASSERT_TRUE(b.recorder.Wait(0.6, [](const Recorder& r) { return r.messages_.size() == 1; }));
  ASSERT_TRUE(a.recorder.Wait(
      3, [](const Recorder& r) { return r.lost_.size() == 4 && r.sent_.size() == 5; }));
  EXPECT_LT(Since(start), 2.5);
  for (const auto& [peer, reason] : a.recorder.lost_) {
    EXPECT_EQ(reason.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(MessageOf(reason), HasSubstr(FormatSocketAddress("127.0.0.1", port)));
  }
  close(listener);
}

TEST(UcxGreetingTest, ManyConnectionsBothWaysAtOnceKeepTheirMessagesApart) {
  End a, b;
  constexpr int kEach = 12;
  std::vector<PeerId> from_a, from_b;
  for (int i = 0; i < kEach; ++i) {
    from_a.push_back(*a.transport->Connect(b.transport->address()));
    from_b.push_back(*b.transport->Connect(a.transport->address()));
    a.transport->Send(from_a.back(), MessageType::kProbe, std::to_string(i), {},
                      a.recorder.Count());
    b.transport->Send(from_b.back(), MessageType::kProbe, std::to_string(i), {},
                      b.recorder.Count());
  }
  for (End* end : {&a, &b}) {
    ASSERT_TRUE(end->recorder.Wait(10, [](const Recorder& r) {
      return r.messages_.size() == kEach && r.sent_.size() == kEach;
    }));
    std::set<PeerId> peers;
    for (const Recorded& message : end->recorder.messages_) peers.insert(message.peer);
    EXPECT_EQ(peers.size(), static_cast<size_t>(kEach)) << "one connection spoke for another";
    EXPECT_TRUE(end->recorder.lost_.empty());
    EXPECT_EQ(end->transport->stats().refused, 0u);
  }
}

TEST(UcxGreetingTest, WhoIsTurnedAwayWhenFullMayComeBackLater) {
  UcxTransportOptions one;
  one.peers_max = 1;
  End full(one), a, b;
  const PeerId first = *a.transport->Connect(full.transport->address());
  a.transport->Send(first, MessageType::kProbe, "1", {}, a.recorder.Count());
  ASSERT_TRUE(full.recorder.Wait(5, [](const Recorder& r) { return r.messages_.size() == 1; }));
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE(b.transport->Connect(full.transport->address()).ok());
    ASSERT_TRUE(b.recorder.Wait(
        5, [&](const Recorder& r) { return static_cast<int>(r.lost_.size()) == i; }));
    EXPECT_THAT(MessageOf(b.recorder.lost_.back().second), HasSubstr("--transport-peers"));
  }
  EXPECT_EQ(full.transport->stats().refused, 3u);
  a.transport->Disconnect(first);
  ASSERT_TRUE(full.recorder.Wait(5, [](const Recorder& r) { return r.lost_.size() == 1; }));
  const PeerId again = *b.transport->Connect(full.transport->address());
  b.transport->Send(again, MessageType::kProbe, "2", {}, b.recorder.Count());
  ASSERT_TRUE(full.recorder.Wait(5, [](const Recorder& r) { return r.messages_.size() == 2; }));
}

TEST(UcxGreetingTest, ConnectionsThatEndLeaveNoDescriptorsBehind) {
  End a, b;
  const auto round = [&](int i) {
    const PeerId peer = *a.transport->Connect(b.transport->address());
    a.transport->Send(peer, MessageType::kProbe, "x", {}, a.recorder.Count());
    ASSERT_TRUE(b.recorder.Wait(
        5, [&](const Recorder& r) { return static_cast<int>(r.messages_.size()) == i; }));
    (i % 2 == 0 ? a : b)
        .transport->Disconnect(i % 2 == 0 ? peer : b.recorder.messages_.back().peer);
    ASSERT_TRUE(Eventually(
        [&] { return a.transport->stats().peers == 0 && b.transport->stats().peers == 0; }));
  };
  round(1);
  round(2);
  usleep(100000);
  const int before = OpenFiles();
  for (int i = 3; i <= 40; ++i) round(i);
  EXPECT_TRUE(Eventually([&] { return OpenFiles() <= before + 2; })) << OpenFiles() - before;
}

}  // namespace
}  // namespace deltamesh
