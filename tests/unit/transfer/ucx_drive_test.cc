// Threads that lend themselves to a UCX transport, beside its own.

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/unit/transfer/ucx_ends.h"

namespace deltamesh {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Takes payloads into a queue; notes which threads handled, and two that did at once.
class Inbox final : public MessageHandler {
 public:
  struct Item {
    PeerId peer;
    std::vector<std::byte> payload;
  };

  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override {
    if (inside_.exchange(true)) at_once_ = true;
    auto item = std::make_shared<Item>();
    item->peer = arrival.peer;
    item->payload.resize(static_cast<size_t>(arrival.payload_bytes));
    if (arrival.payload_bytes == 0) Take(item);
    inside_ = false;
    return PayloadTarget{.buffer = item->payload, .done = [this, item](const absl::Status& status) {
                           if (status.ok()) Take(item);
                         }};
  }
  void OnPeerLost(PeerId, const absl::Status&) override {}

  size_t size() const {
    std::lock_guard lock(mutex_);
    return items_.size();
  }
  Item Pop() {
    std::lock_guard lock(mutex_);
    Item item = std::move(*items_.front());
    items_.pop_front();
    return item;
  }
  int64_t handled_by(std::thread::id id) const {
    std::lock_guard lock(mutex_);
    const auto it = threads_.find(id);
    return it == threads_.end() ? 0 : it->second;
  }
  bool at_once() const { return at_once_; }

 private:
  void Take(const std::shared_ptr<Item>& item) {
    std::lock_guard lock(mutex_);
    ++threads_[std::this_thread::get_id()];
    items_.push_back(item);
  }

  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<Item>> items_;
  std::map<std::thread::id, int64_t> threads_;
  std::atomic<bool> inside_{false}, at_once_{false};
};

struct Driven {
  Inbox inbox, segments;
  std::unique_ptr<UcxTransport> transport;

  explicit Driven(absl::Duration spin = absl::ZeroDuration()) {
    UcxTransportOptions options = LoopbackOptions();
    options.spin = spin;
    transport = OpenLoopback(options);
    transport->SetHandler(MessageType::kProbe, &inbox);
    transport->SetHandler(MessageType::kHandoffSegment, &segments);
  }
  ~Driven() { transport.reset(); }
  bool Await(size_t items, steady_clock::duration longest) {
    const auto deadline = steady_clock::now() + longest;
    while (inbox.size() < items && steady_clock::now() < deadline) {
      transport->Drive([&] { return inbox.size() >= items; }, deadline);
    }
    return inbox.size() >= items;
  }
};

void Ignore(const absl::Status&) {}

// The parameter: how long threads look for events before they sleep.
class UcxSpinTest : public ::testing::TestWithParam<absl::Duration> {};
INSTANTIATE_TEST_SUITE_P(Spin, UcxSpinTest,
                         ::testing::Values(absl::ZeroDuration(), absl::Microseconds(50)));

TEST_P(UcxSpinTest, RoundTripsRunOnTheDrivingThreadsWhileOthersSend) {
  Driven a(GetParam()), b(GetParam());
  const PeerId peer = *a.transport->Connect(b.transport->address());
  constexpr int kRounds = 600;
  std::thread server([&] {
    std::deque<std::vector<std::byte>> sent;  // until completed
    for (int i = 0; i < kRounds; ++i) {
      if (!b.Await(1, seconds(30))) return;
      Inbox::Item item = b.inbox.Pop();
      sent.push_back(std::move(item.payload));
      b.transport->SendHere(item.peer, MessageType::kProbe, "answer", sent.back(), Ignore);
    }
    b.Await(1, seconds(30));  // the last word; what was sent is used until then
  });
  std::atomic<int> segments{0};
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      a.transport->Send(peer, MessageType::kHandoffSegment, "segment", {},
                        [&](const absl::Status& status) { segments += status.ok(); });
      if (i % 16 == 0) std::this_thread::sleep_for(milliseconds(1));
    }
  });
  std::deque<std::vector<std::byte>> asked;  // until completed
  for (int i = 0; i < kRounds; ++i) {
    const size_t size = i % 50 == 49 ? 200000 : static_cast<size_t>(1 + i * 37 % 9000);
    asked.push_back(Pattern(size, static_cast<uint32_t>(i)));
    const std::vector<std::byte>& payload = asked.back();
    a.transport->SendHere(peer, MessageType::kProbe, "question", payload, Ignore);
    ASSERT_TRUE(a.Await(1, seconds(30))) << i;
    ASSERT_TRUE(a.inbox.Pop().payload == payload) << i;
  }
  other.join();
  const std::vector<std::byte> last(1);
  a.transport->SendHere(peer, MessageType::kProbe, "end", last, Ignore);
  const std::thread::id server_id = server.get_id();
  server.join();
  const auto start = steady_clock::now();
  while ((segments < kRounds || b.segments.size() < kRounds) && Since(start) < 30) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(segments, kRounds);
  EXPECT_EQ(b.segments.size(), kRounds);
  // What the transport's own thread had begun to handle is not the driver's.
  EXPECT_GT(a.inbox.handled_by(std::this_thread::get_id()), kRounds / 20);
  EXPECT_GT(b.inbox.handled_by(server_id), kRounds / 20);
  EXPECT_FALSE(a.inbox.at_once() || b.inbox.at_once());
}

TEST(UcxDriveTest, TheOwnThreadSeesWhatArrivesAfterADrive) {
  Driven a, b;
  const PeerId peer = *b.transport->Connect(a.transport->address());
  std::deque<std::vector<std::byte>> sent;
  for (int i = 0; i < 300; ++i) {
    // Ends with the worker just polled, or after sleeping armed.
    a.transport->Drive([] { return false; },
                       steady_clock::now() + std::chrono::microseconds(i % 3 * 200));
    sent.emplace_back(static_cast<size_t>(1 + i));
    const auto start = steady_clock::now();
    b.transport->Send(peer, MessageType::kProbe, "news", sent.back(), Ignore);
    while (a.inbox.size() == 0 && Since(start) < 20) std::this_thread::yield();
    // The first also connects. A missed event would show only when the thread looks by itself.
    ASSERT_LT(Since(start), i == 0 ? 20 : 0.9) << i;
    a.inbox.Pop();
  }
}

TEST(UcxDriveTest, EndsAtItsDeadlineOrWhenNudgedAndTurnsASecondDriverAway) {
  Driven a;
  const auto start = steady_clock::now();
  EXPECT_TRUE(a.transport->Drive([] { return false; }, start + milliseconds(50)));
  EXPECT_GE(Since(start), 0.05);
  EXPECT_LT(Since(start), 5);

  std::atomic<bool> enough{false}, driving{false};
  std::thread driver([&] {
    a.transport->Drive(
        [&] {
          driving = true;
          return enough.load();
        },
        steady_clock::now() + seconds(30));
  });
  while (!driving) std::this_thread::yield();
  EXPECT_FALSE(a.transport->Drive([] { return true; }, steady_clock::now() + seconds(1)));
  enough = true;
  a.transport->Nudge();
  driver.join();
  EXPECT_LT(Since(start), 20);
}

TEST(UcxDriveTest, ADriverSeesItsSendsFailWithThePeer) {
  Driven a;
  auto b = std::make_unique<Driven>();
  const PeerId peer = *a.transport->Connect(b->transport->address());
  const std::vector<std::byte> payload(10);
  a.transport->SendHere(peer, MessageType::kProbe, "hello", payload, Ignore);
  ASSERT_TRUE(b->Await(1, seconds(20)));
  b.reset();
  const auto deadline = steady_clock::now() + seconds(20);
  bool failed = false;
  while (!failed && steady_clock::now() < deadline) {
    std::atomic<bool> told{false};
    a.transport->SendHere(peer, MessageType::kProbe, "again", payload,
                          [&](const absl::Status& status) {
                            failed = !status.ok();
                            told = true;
                          });
    a.transport->Drive([&] { return told.load(); }, deadline);
    ASSERT_TRUE(told);
  }
  EXPECT_TRUE(failed);
}

// Sends that follow each other's completions leave the holder no moment without work. That must neither keep
// a driver out nor hold it beyond its deadline.
TEST_P(UcxSpinTest, ADriverComesInAndLeavesWhileThereIsAlwaysWork) {
  Driven a(GetParam());
  std::atomic<bool> stop{false};
  std::atomic<int64_t> sent{0};
  std::function<void(absl::Status)> next = [&](const absl::Status&) {
    ++sent;
    const PeerId nobody = 999;
    if (!stop) a.transport->Send(nobody, MessageType::kHandoffSegment, "segment", {}, next);
  };
  next(absl::OkStatus());
  std::thread timer([&] {
    for (int i = 0; i < 500 && !stop; ++i) std::this_thread::sleep_for(milliseconds(10));
    stop = true;
  });
  for (int i = 0; i < 20; ++i) {
    const int64_t before = sent;
    while (!stop && sent < before + 100) std::this_thread::yield();
    const auto start = steady_clock::now();
    EXPECT_TRUE(a.transport->Drive([] { return false; }, start + milliseconds(5)));
    EXPECT_LT(Since(start), 0.5) << i;
  }
  EXPECT_FALSE(stop) << "a driver was held";
  stop = true;
  timer.join();
  a.transport.reset();
}

}  // namespace
}  // namespace deltamesh
