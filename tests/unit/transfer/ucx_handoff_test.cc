// A hand-off over UCX: real threads, rendezvous and eager segments, and a connection cut half way.

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "tests/unit/transfer/handoff_fixture.h"
#include "tests/unit/transfer/ucx_recorder.h"

namespace deltamesh {
namespace {

constexpr int64_t kPosition = 4 * kBlockTokens;

// Regions from 40 KiB to 4.2 MiB.
StateLayout MediumLayout() {
  StateLayout layout;
  layout.kda_layers = 3;
  layout.heads = 66;
  layout.dim = 128;
  layout.conv_taps = 4;
  layout.mla_layers = 2;
  layout.rank = 128;
  layout.rope = 32;
  return layout;
}

// The parameter: the longest segment.
class UcxHandoffTest : public ::testing::TestWithParam<int64_t> {
 protected:
  UcxHandoffTest() {
    HandoffReceiverOptions receive;
    receive.name = "decode-0";
    receive.epoch = 3;
    receive.layout = layout_;
    receiver_ = std::make_unique<HandoffReceiver>(receive_transport_.get(), &clock_, &entropy_,
                                                  receive, [this](HandoffEvent e) {
                                                    std::lock_guard lock(mutex_);
                                                    event_ = std::move(e);
                                                    changed_.notify_all();
                                                  });
    HandoffSenderOptions send;
    send.name = "prefill-0";
    send.layout = layout_;
    send.segment_bytes_max = GetParam();
    sender_ = std::make_unique<HandoffSender>(send_transport_.get(), &clock_, send,
                                              [this](HandoffSent s) {
                                                std::lock_guard lock(mutex_);
                                                sent_ = std::move(s);
                                                changed_.notify_all();
                                              });
  }
  ~UcxHandoffTest() override {
    send_transport_.reset();
    receive_transport_.reset();
  }

  void Begin() {
    HandoffGrant grant;
    grant.request_id = "r1";
    grant.position = kPosition;
    grant.buffers = *HandoffBuffers::Reserve(receive_pools_, kPosition);
    HandoffStart start;
    start.request_id = "r1";
    start.landing = *receiver_->Grant(std::move(grant));
    ASSERT_TRUE(sender_->Begin(std::move(start)).ok());
  }

  bool Wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), condition);
  }

  const StateLayout layout_ = MediumLayout();
  SystemClock clock_;
  SystemEntropy entropy_;
  StatePools send_pools_ = *StatePools::Create(layout_, 1, 4),
             receive_pools_ = *StatePools::Create(layout_, 1, 4);
  Source source_{send_pools_, kPosition};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<HandoffEvent> event_;
  std::optional<HandoffSent> sent_;
  std::unique_ptr<HandoffReceiver> receiver_;
  std::unique_ptr<HandoffSender> sender_;
  std::unique_ptr<UcxTransport> receive_transport_ = OpenLoopback(),
                                send_transport_ = OpenLoopback();
};

TEST_P(UcxHandoffTest, EveryRegionArrivesBitForBit) {
  Begin();
  for (int64_t b = 0; b < 4; ++b) sender_->SendBlock("r1", b, source_.state->blocks()[b]);
  for (int64_t l = 0; l < layout_.kda_layers; ++l)
    sender_->SendLayer("r1", l, source_.state->slab());
  ASSERT_TRUE(Wait([&] { return event_.has_value() && sent_.has_value(); }));
  EXPECT_TRUE(sent_->status.ok()) << sent_->status;
  ASSERT_TRUE(std::holds_alternative<HandoffCompleted>(*event_));
  const HandoffCompleted& completed = std::get<HandoffCompleted>(*event_);
  EXPECT_EQ(completed.bytes, static_cast<uint64_t>(RegionPlan(layout_, kPosition, 0).bytes()));
  for (int64_t l = 0; l < layout_.kda_layers; ++l) {
    EXPECT_TRUE(SameBits(SlabStateSpan(layout_, completed.state->slab().data(), l),
                         SlabStateSpan(layout_, source_.state->slab().data(), l)));
    EXPECT_TRUE(SameBits(SlabConvSpan(layout_, completed.state->slab().data(), l),
                         SlabConvSpan(layout_, source_.state->slab().data(), l)));
  }
  const auto size = static_cast<size_t>(layout_.block_floats());
  for (int64_t b = 0; b < 4; ++b) {
    EXPECT_TRUE(SameBits({completed.state->blocks()[b].data(), size},
                         {source_.state->blocks()[b].data(), size}));
  }
}

TEST_P(UcxHandoffTest, ASenderThatGoesAwayIsReportedAndLeavesNothing) {
  Begin();
  sender_->SendBlock("r1", 0, source_.state->blocks()[0]);
  sender_->SendLayer("r1", 0, source_.state->slab());
  while (receive_transport_->stats().messages_received < 2) usleep(1000);
  send_transport_.reset();
  ASSERT_TRUE(Wait([&] { return event_.has_value(); }));
  ASSERT_TRUE(std::holds_alternative<HandoffRefused>(*event_));
  EXPECT_EQ(std::get<HandoffRefused>(*event_).reason, mesh::PEER_LOST);
  event_.reset();
  EXPECT_EQ(receive_pools_.slabs->free_slots(), 1);
  EXPECT_EQ(receive_pools_.blocks->free_slots(), 4);
  EXPECT_EQ(source_.state->slab().use_count(), 1);
}

TEST_P(UcxHandoffTest, AReceiverThatGoesAwayIsReportedAndUnpins) {
  Begin();
  sender_->SendBlock("r1", 0, source_.state->blocks()[0]);
  sender_->SendLayer("r1", 0, source_.state->slab());
  while (receive_transport_->stats().messages_received < 2) usleep(1000);
  receive_transport_.reset();
  ASSERT_TRUE(Wait([&] { return sent_.has_value(); }));
  EXPECT_EQ(sent_->status.code(), absl::StatusCode::kUnavailable);
  for (int i = 0; i < 2000 && source_.state->slab().use_count() > 1; ++i) usleep(1000);
  EXPECT_EQ(source_.state->slab().use_count(), 1);
}

INSTANTIATE_TEST_SUITE_P(EagerAndByRendezvous, UcxHandoffTest,
                         ::testing::Values(kHandoffSegmentBytesMax, 1 << 20));

TEST(UcxHandoffSegmentTest, OneOfTheUsualSizeIsSentEagerly) {
  EXPECT_LT(kHandoffSegmentBytesMax, UcxTransportOptions().rendezvous_bytes);
}

}  // namespace
}  // namespace deltamesh
