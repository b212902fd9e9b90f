// Time in a hand-off: silence is bounded, the time a prompt computes is not.

#include "tests/unit/transfer/handoff_fixture.h"

namespace deltamesh {
namespace {

class HandoffTimeTest : public HandoffTest {
 protected:
  void SetUp() override {
    HandoffTest::SetUp();
    receiver_options_.idle_max = absl::Seconds(2);
    sender_options_.idle_max = absl::Seconds(30);  // the receiver's limit is what counts
  }

  // Both ends live on for `d`, in steps of a tick.
  void Live(absl::Duration d) {
    for (absl::Duration t; t < d; t += absl::Milliseconds(100)) PassTime(absl::Milliseconds(100));
  }
  // As Live, but the sender is stopped.
  void LiveWithoutSender(absl::Duration d) {
    for (absl::Duration t; t < d; t += absl::Milliseconds(100)) {
      clock_.Advance(absl::Milliseconds(100));
      receiver_->Tick(clock_.Now());
    }
  }
  void GiveBlock(int64_t b) { sender_->SendBlock("r1", b, source_->state->blocks()[b]); }
};

TEST_F(HandoffTimeTest, ComputeMayTakeFarLongerThanTheIdleLimit) {
  Start();
  const mesh::Landing landing = Grant();
  Live(absl::Minutes(2));  // the request waits for a prefill worker
  ASSERT_TRUE(Begin(landing).ok());
  Live(absl::Minutes(5));  // and in its queue
  GiveBlock(0);
  Live(absl::Minutes(1));  // and computes
  GiveBlock(1);
  GiveBlock(2);
  for (int64_t l = 0; l < layout_.kda_layers; ++l) {
    Live(absl::Seconds(20));
    sender_->SendLayer("r1", l, source_->state->slab());
  }
  Settle();
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
  ExpectSentOnce(mesh::NONE);
  ExpectBaseline();
}

// Four signs of life within the receiver's limit, and none once the data says it.
TEST_F(HandoffTimeTest, KeepAlivesAreFew) {
  int64_t alive = 0;
  network_->SetFault([&](const InprocMessage& m) {
    alive += m.type == MessageType::kHandoffAlive;
    return InprocFault{};
  });
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  Live(absl::Seconds(20));
  EXPECT_GE(alive, 36);
  EXPECT_LE(alive, 41);
  GiveAll();
  const int64_t before = alive;
  Live(absl::Seconds(20));
  EXPECT_EQ(alive, before);
  EXPECT_EQ(completed_.size(), 1u);
}

TEST_F(HandoffTimeTest, AStoppedSenderIsRefusedWithinTheIdleLimit) {
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  GiveBlock(0);
  Live(absl::Seconds(10));
  LiveWithoutSender(absl::Seconds(1));
  EXPECT_TRUE(refused_.empty());
  LiveWithoutSender(absl::Seconds(1.1));
  ASSERT_EQ(refused_.size(), 1u);
  EXPECT_THAT(refused_[0].detail, ::testing::HasSubstr("silent for 2s"));
  ExpectRefused(mesh::TIMEOUT);
}

// A canary for the tests above: it is the signs of life that keep a transfer open.
TEST_F(HandoffTimeTest, LostKeepAlivesEndTheTransfer) {
  network_->SetFault([](const InprocMessage& m) {
    return InprocFault{.drop = m.type == MessageType::kHandoffAlive};
  });
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  Live(absl::Seconds(2.5));
  ExpectRefused(mesh::TIMEOUT);
}

// A long step: nobody calls Tick, but the other thread speaks - until the owner counts as hung.
TEST_F(HandoffTimeTest, KeepAliveSpeaksForAStepUntilTheStallLimit) {
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  Live(absl::Seconds(1));
  auto pass = [&](absl::Duration d) {
    for (absl::Duration t; t < d; t += absl::Milliseconds(100)) {
      clock_.Advance(absl::Milliseconds(100));
      sender_->KeepAlive(clock_.Now());
      receiver_->Tick(clock_.Now());
    }
  };
  pass(sender_options_.stall_max - absl::Seconds(1));
  EXPECT_TRUE(refused_.empty());
  pass(absl::Seconds(4));
  ExpectRefused(mesh::TIMEOUT);
}

TEST_F(HandoffTimeTest, TheRequestsDeadlineEndsBothEnds) {
  Start();
  auto buffers = HandoffBuffers::Reserve(receive_pools_, kPosition);
  HandoffGrant grant;
  grant.request_id = "r1";
  grant.position = kPosition;
  grant.buffers = *std::move(buffers);
  grant.deadline = clock_.Now() + absl::Seconds(30);
  HandoffStart start;
  start.request_id = "r1";
  start.deadline = grant.deadline;
  start.landing = *receiver_->Grant(std::move(grant));
  ASSERT_TRUE(sender_->Begin(std::move(start)).ok());
  Live(absl::Seconds(29));
  EXPECT_TRUE(refused_.empty());
  EXPECT_TRUE(sent_.empty());
  Live(absl::Seconds(2));
  ExpectRefused(mesh::TIMEOUT);
}

// Keep-alives must not hold open what the seal has closed.
TEST_F(HandoffTimeTest, AMissingSegmentIsIncompleteAfterTheGrace) {
  FaultOn(MessageType::kHandoffSegment, 4, {.drop = true});
  Start();
  Run();
  Live(receiver_options_.seal_grace + absl::Seconds(0.2));
  ExpectRefused(mesh::INCOMPLETE);
}

TEST_F(HandoffTimeTest, StrayKeepAlivesTouchNothing) {
  Start();
  const mesh::Landing landing = Grant();
  auto raw = *network_->Open("raw");
  const PeerId peer = *raw->Connect("decode-0");
  mesh::Alive alive;
  alive.mutable_key()->set_transfer_id(landing.transfer_id());
  for (const uint64_t token : {landing.token_low(), landing.token_low() ^ 1}) {
    alive.mutable_key()->set_token_low(token);
    alive.mutable_key()->set_token_high(landing.token_high());
    raw->Send(peer, MessageType::kHandoffAlive, alive.SerializeAsString(), {}, [](absl::Status) {});
  }
  raw->Send(peer, MessageType::kHandoffAlive, "\xff", {}, [](absl::Status) {});
  EXPECT_EQ(receiver_->stats().late, 3u);
  ASSERT_TRUE(Begin(landing).ok());
  GiveAll();
  EXPECT_EQ(completed_.size(), 1u);
  raw.reset();
}

}  // namespace
}  // namespace deltamesh
