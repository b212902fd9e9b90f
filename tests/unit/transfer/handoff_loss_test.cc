// Peers that die and landings that are revoked half way: buffers wait for payloads in flight.

#include "tests/unit/transfer/handoff_fixture.h"

namespace deltamesh {
namespace {

class HandoffLossTest : public HandoffTest {
 protected:
  HandoffLossTest() : HandoffTest(InprocOptions{InprocDelivery::kQueued}) {}

  // Runs until `segments` segments have landed and one more was taken, but has not landed.
  void StopInFlight(int64_t segments) {
    Start();
    CHECK_OK(Begin(Grant()));
    GiveAll();
    const uint64_t manifest_and_segments = 1 + static_cast<uint64_t>(segments) + 1;
    while (receive_transport_->stats().messages_received < manifest_and_segments)
      CHECK(network_->DeliverOne());
  }

  // A second hand-off, over the same connection.
  void BeginBeside() {
    CHECK_OK(Begin(Grant("r2"), "r2"));
    GiveAll("r2");
  }
};

TEST_F(HandoffLossTest, SenderDiesHalfWay) {
  for (int64_t step = 0; step < 40; ++step) {
    SCOPED_TRACE(step);
    TearDown();
    sent_.clear();
    network_ = std::make_unique<InprocNetwork>(InprocOptions{InprocDelivery::kQueued});
    Start();
    ASSERT_TRUE(Begin(Grant()).ok());
    GiveAll();
    for (int64_t i = 0; i < step; ++i) network_->DeliverOne();
    network_->Kill("prefill-0");
    Settle();
    PassTime(absl::Minutes(11));  // the dead end forgets too, and a silent one times out
    ASSERT_EQ(refused_.size() + completed_.size(), 1u);
    if (!refused_.empty()) {
      EXPECT_EQ(ReasonName(refused_[0].reason), step == 0 ? "TIMEOUT" : "PEER_LOST");
    }
    ExpectBaseline();
  }
}

TEST_F(HandoffLossTest, ReceiverDiesHalfWay) {
  StopInFlight(3);
  network_->Kill("decode-0");
  Settle();
  ExpectSentOnce(mesh::PEER_LOST);
  EXPECT_EQ(sent_[0].status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(source_->state->slab().use_count(), 1) << "pins are gone";
  for (const SlotRef& block : source_->state->blocks()) EXPECT_EQ(block.use_count(), 1);
}

TEST_F(HandoffLossTest, NobodyAtTheAddress) {
  Start();
  mesh::Landing landing = Grant();
  landing.set_transport_address("decode-9");
  ASSERT_TRUE(Begin(landing).ok());
  GiveAll();
  Settle();
  ExpectSentOnce(mesh::PEER_LOST);
  receiver_->Revoke("r1");
  ExpectBaseline();
}

TEST_F(HandoffLossTest, NextHandoffConnectsAgainAfterALoss) {
  StopInFlight(2);
  network_->Kill("decode-0");
  Settle();
  ExpectSentOnce(mesh::PEER_LOST);
  receive_transport_.reset();
  refused_.clear();
  receive_transport_ = *network_->Open("decode-0");
  HandoffReceiver second(
      receive_transport_.get(), &clock_, &entropy_, receiver_options_,
      [this](HandoffEvent e) { completed_.push_back(std::move(std::get<HandoffCompleted>(e))); });
  HandoffGrant grant;
  grant.request_id = "r1";
  grant.position = kPosition;
  grant.buffers = *HandoffBuffers::Reserve(receive_pools_, kPosition);
  ASSERT_TRUE(Begin(*second.Grant(std::move(grant))).ok());
  GiveAll();
  Settle();
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
  receive_transport_.reset();
}

TEST_F(HandoffLossTest, EachConnectionIsToldOfOnce) {
  std::vector<std::pair<PeerId, std::string>> connected;
  sender_options_.on_connected = [&](PeerId peer, const std::string& receiver, uint64_t) {
    EXPECT_EQ(sender_->stats().open, 1) << "no lock is held";
    connected.emplace_back(peer, receiver);
  };
  Start();
  Run();
  Run();
  ASSERT_EQ(connected.size(), 1u);
  EXPECT_EQ(connected[0].second, "decode-0");
  ASSERT_TRUE(Begin(Grant()).ok());
  network_->Kill("decode-0");
  Settle();
  EXPECT_EQ(connected.size(), 1u);
}

TEST_F(HandoffLossTest, RevokedBuffersWaitForThePayloadInFlight) {
  StopInFlight(2);
  receiver_->Revoke("r1");
  EXPECT_EQ(receiver_->stats().open, 0);
  EXPECT_EQ(receiver_->stats().draining, 1);
  EXPECT_EQ(receive_pools_.slabs->free_slots(), kSlabs - 1) << "still being written";
  Settle();
  EXPECT_EQ(receiver_->stats().draining, 0);
  EXPECT_TRUE(refused_.empty());
  EXPECT_TRUE(completed_.empty());
  EXPECT_EQ(receiver_->stats().revoked, 1u);
  ExpectSentOnce(mesh::UNKNOWN_TRANSFER);
  ExpectBaseline();
}

TEST_F(HandoffLossTest, RefusalIsReportedOnlyWhenNothingWritesAnyMore) {
  FaultOn(MessageType::kHandoffSegment, 1, {.flip_payload_byte = 1});
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  GiveAll();
  while (receiver_->stats().refused[mesh::CHECKSUM] == 0) ASSERT_TRUE(network_->DeliverOne());
  EXPECT_TRUE(refused_.empty()) << "segments taken before are still landing";
  EXPECT_EQ(receiver_->stats().draining, 1);
  Settle();
  ExpectRefused(mesh::CHECKSUM);
}

TEST_F(HandoffLossTest, APeerThatNeverFinishesWritingIsCutOff) {
  StopInFlight(2);
  receiver_->Revoke("r1");
  clock_.Advance(absl::Seconds(1));
  receiver_->Tick(clock_.Now());  // past the grace: disconnects, which completes the payload
  EXPECT_EQ(receiver_->stats().draining, 0);
  EXPECT_EQ(receive_pools_.slabs->free_slots(), kSlabs);
  Settle();
  ExpectBaseline();
}

// A slow connection: more than the grace in all, each segment well within it. To disconnect would
// end what runs beside.
TEST_F(HandoffLossTest, ACancelledHandoffThatStillMovesIsNotCutOff) {
  StopInFlight(6);
  BeginBeside();
  sender_->Cancel("r1");
  const absl::Time cancelled = clock_.Now();
  while (sender_->stats().draining > 0) {
    ASSERT_TRUE(network_->DeliverOne());
    clock_.Advance(sender_options_.drain_grace / 4);
    sender_->Tick(clock_.Now());
  }
  EXPECT_GT(clock_.Now() - cancelled, 2 * sender_options_.drain_grace);
  receiver_->Revoke("r1");
  Settle();
  ASSERT_EQ(completed_.size(), 1u);
  EXPECT_EQ(completed_[0].request_id, "r2");
  ExpectWhole(*completed_[0].state);
  ExpectSentOnce(mesh::NONE);
  ExpectBaseline();
}

TEST_F(HandoffLossTest, ARevokedLandingThatIsStillWrittenIsNotCutOff) {
  StopInFlight(6);
  BeginBeside();
  receiver_->Revoke("r1");
  const absl::Time revoked = clock_.Now();
  while (receiver_->stats().draining > 0) {
    ASSERT_TRUE(network_->DeliverOne());
    clock_.Advance(receiver_options_.drain_grace / 4);
    receiver_->Tick(clock_.Now());
  }
  EXPECT_GT(clock_.Now() - revoked, receiver_options_.drain_grace);
  Settle();
  ASSERT_EQ(completed_.size(), 1u);
  EXPECT_EQ(completed_[0].request_id, "r2");
  ExpectWhole(*completed_[0].state);
  ExpectBaseline();
}

TEST_F(HandoffLossTest, CancelKeepsPinsUntilTheTransportIsDone) {
  StopInFlight(2);
  sender_->Cancel("r1");
  EXPECT_EQ(sender_->stats().open, 0);
  EXPECT_EQ(sender_->stats().draining, 1);
  Settle();
  EXPECT_TRUE(sent_.empty()) << "a cancelled hand-off has no result";
  EXPECT_EQ(sender_->stats().draining, 0);
  EXPECT_EQ(source_->state->slab().use_count(), 1);
  receiver_->Revoke("r1");
  Settle();
  ExpectBaseline();
}

TEST_F(HandoffLossTest, CancelBeforeAnythingWasAccepted) {
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  GiveAll();
  sender_->Cancel("r1");
  EXPECT_EQ(source_->state->slab().use_count(), 1);
  Settle();
  EXPECT_TRUE(sent_.empty());
  receiver_->Revoke("r1");
  Settle();
  ExpectBaseline();
}

TEST_F(HandoffLossTest, AReceiverThatNeverAnswersTimesTheSenderOut) {
  StopInFlight(2);
  clock_.Advance(absl::Seconds(61));
  sender_->Tick(clock_.Now());
  ExpectSentOnce(mesh::TIMEOUT);
  EXPECT_EQ(sender_->stats().draining, 1) << "segments are still being read";
  clock_.Advance(absl::Seconds(1));
  sender_->Tick(clock_.Now());
  EXPECT_EQ(sender_->stats().draining, 0) << "disconnected";
  EXPECT_EQ(source_->state->slab().use_count(), 1);
  Settle();
  ExpectBaseline();
}

TEST_F(HandoffLossTest, BeginAgainReplacesTheOpenTransfer) {
  StopInFlight(2);
  const mesh::Landing landing = Grant("r1", 1);  // revokes the first
  ASSERT_TRUE(Begin(landing, "r1", 1).ok());
  GiveAll();
  Settle();
  ASSERT_EQ(completed_.size(), 1u);
  EXPECT_EQ(completed_[0].serial, 1u);
  ExpectWhole(*completed_[0].state);
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].serial, 1u);
  ExpectBaseline();
}

TEST_F(HandoffLossTest, TransportsCloseWithTransfersOpen) {
  StopInFlight(2);
  send_transport_.reset();
  receive_transport_.reset();
  ExpectBaseline();
}

}  // namespace
}  // namespace deltamesh
