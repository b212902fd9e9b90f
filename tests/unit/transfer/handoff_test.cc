// A hand-off that goes well, in every order and interleaving.

#include "runtime/base/crc32c.h"
#include "runtime/transfer/crc32c_combine.h"
#include "tests/unit/transfer/handoff_fixture.h"

namespace deltamesh {
namespace {

TEST(Crc32cCombineTest, EqualsTheChecksumOfTheWhole) {
  std::vector<std::byte> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 37 + i / 251);
  const std::span<const std::byte> all(bytes);
  for (size_t cut : {0u, 1u, 7u, 64u, 500u, 999u, 1000u}) {
    EXPECT_EQ(Crc32cCombine(Crc32c(all.first(cut)), Crc32c(all.subspan(cut)), bytes.size() - cut),
              Crc32c(all))
        << cut;
  }
}

TEST(RegionPlanTest, CoversEveryByteOnceAndFindsItself) {
  const StateLayout layout = SmallLayout();
  for (int64_t have : {0, 1, 3}) {
    const RegionPlan plan(layout, 3 * kBlockTokens, have);
    uint64_t bytes = 0;
    for (int64_t i = 0; i < plan.size(); ++i) {
      const mesh::Region region = plan.At(i);
      EXPECT_EQ(region.index(), static_cast<uint32_t>(i));
      EXPECT_EQ(plan.Find(region), i);
      EXPECT_LE(region.ByteSizeLong() + 4, static_cast<size_t>(kHandoffRegionWireBytes));
      bytes += region.bytes();
    }
    EXPECT_EQ(bytes, static_cast<uint64_t>(plan.bytes()));
    EXPECT_EQ(plan.bytes(), (3 - have) * layout.block_bytes() + layout.snapshot_bytes());
  }
}

TEST_F(HandoffTest, EveryRegionArrivesBitForBit) {
  Start();
  Run();
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
  EXPECT_EQ(completed_[0].request_id, "r1");
  EXPECT_EQ(completed_[0].bytes, static_cast<uint64_t>(RegionPlan(layout_, kPosition, 0).bytes()));
  EXPECT_EQ(completed_[0].state->blocks().size(), 4u) << "reserved blocks beyond the position stay";
  ExpectSentOnce(mesh::NONE);
  EXPECT_EQ(receiver_->stats().completed, 1u);
  EXPECT_EQ(sender_->stats().completed, 1u);
  ExpectBaseline();
}

TEST_F(HandoffTest, RegionsMayBeGivenBeforeTheManifestIsAccepted) {
  network_ = std::make_unique<InprocNetwork>(InprocOptions{InprocDelivery::kQueued});
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  GiveAll();
  EXPECT_EQ(network_->queued(), 1) << "only the manifest is under way";
  EXPECT_GT(source_->state->slab().use_count(), 1) << "waiting regions are pinned";
  Settle();
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
  ExpectBaseline();
}

TEST_F(HandoffTest, LayersMayComeInAnyOrder) {
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  for (int64_t l = layout_.kda_layers - 1; l >= 0; --l)
    sender_->SendLayer("r1", l, source_->state->slab());
  EXPECT_TRUE(completed_.empty());
  for (int64_t b : {1, 2, 0}) sender_->SendBlock("r1", b, source_->state->blocks()[b]);
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
}

TEST_F(HandoffTest, HeldBlocksAreNotSentAndNotWritten) {
  Start();
  // The receiver holds block 0 in two places, with the content it must keep.
  SlotRef held = *receive_pools_.blocks->Take();
  const auto size = static_cast<size_t>(layout_.block_floats());
  std::memcpy(held.data(), source_->state->blocks()[0].data(), size * 4);
  HandoffGrant grant;
  grant.request_id = "r1";
  grant.position = kPosition;
  grant.buffers = *HandoffBuffers::Reserve(receive_pools_, kPosition, {held});
  const mesh::Landing landing = *receiver_->Grant(std::move(grant));
  EXPECT_EQ(landing.have_blocks(), 1u);

  int64_t latents = 0;
  network_->SetFault([&](const InprocMessage& m) {
    if (m.type == MessageType::kHandoffSegment) latents += m.payload_bytes;
    return InprocFault{};
  });
  ASSERT_TRUE(Begin(landing).ok());
  GiveAll();
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
  EXPECT_EQ(latents, 2 * layout_.block_bytes() + layout_.snapshot_bytes());
  EXPECT_EQ(completed_[0].state->blocks()[0].index(), held.index());
  held = SlotRef();
  ExpectBaseline();
}

TEST_F(HandoffTest, AThousandRegionsTravelInThePayload) {
  // More regions than fit a header: many MLA layers with tiny rows.
  layout_.mla_layers = 700;
  layout_.rank = 1;
  layout_.rope = 0;
  SetUp();
  bool manifest_in_payload = false, seal_in_payload = false;
  network_->SetFault([&](const InprocMessage& m) {
    if (m.type == MessageType::kHandoffManifest) manifest_in_payload = m.payload_bytes > 0;
    if (m.type == MessageType::kHandoffSeal) seal_in_payload = m.payload_bytes > 0;
    return InprocFault{};
  });
  Start();
  Run();
  EXPECT_TRUE(manifest_in_payload);
  EXPECT_EQ(seal_in_payload, 4 * 3 * 700 > kHandoffInlineBytes);
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
  ExpectBaseline();
}

// It comes with the state, of whatever size the seal is; of another try it says nothing.
TEST_F(HandoffTest, TheSealTellsWhatWasRestored) {
  Start();
  ASSERT_TRUE(Begin(Grant()).ok());
  sender_->SetRestored("r1", 2 * kBlockTokens);
  ASSERT_TRUE(Begin(Grant()).ok());
  GiveAll();
  Settle();
  ASSERT_EQ(completed_.size(), 1u);
  EXPECT_EQ(completed_[0].restored_tokens, 0);
  ASSERT_TRUE(Begin(Grant()).ok());
  sender_->SetRestored("r1", kPosition);
  sender_->SetRestored("other", 1);
  GiveAll();
  Settle();
  ASSERT_EQ(completed_.size(), 2u);
  EXPECT_EQ(completed_[1].restored_tokens, kPosition);
}

TEST_F(HandoffTest, TwoRequestsShareAConnectionWithoutMixing) {
  Start();
  ASSERT_TRUE(Begin(Grant("r1"), "r1").ok());
  ASSERT_TRUE(Begin(Grant("r2"), "r2").ok());
  EXPECT_EQ(send_transport_->stats().peers, 1u);
  GiveAll("r2");
  GiveAll("r1");
  ASSERT_EQ(completed_.size(), 2u);
  EXPECT_EQ(completed_[0].request_id, "r2");
  ExpectWhole(*completed_[0].state);
  ExpectWhole(*completed_[1].state);
}

TEST_F(HandoffTest, AnyOrderOfDeliveryGivesTheSameState) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    TearDown();
    completed_.clear();
    sent_.clear();
    network_ = std::make_unique<InprocNetwork>(InprocOptions{InprocDelivery::kQueued, true, seed});
    Start();
    Run();
    ASSERT_EQ(completed_.size(), 1u);
    ExpectWhole(*completed_[0].state);
    ExpectSentOnce(mesh::NONE);
    ExpectBaseline();
  }
}

TEST_F(HandoffTest, LandingsAreUnguessableAndSingleUse) {
  Start();
  const mesh::Landing a = Grant("a"), b = Grant("b");
  EXPECT_NE(a.transfer_id(), b.transfer_id());
  EXPECT_NE(a.token_low(), b.token_low());
  EXPECT_EQ(a.receiver(), "decode-0");
  EXPECT_EQ(a.receiver_epoch(), 5u);
  EXPECT_EQ(a.transport_address(), "decode-0");
  EXPECT_EQ(a.position(), static_cast<uint64_t>(kPosition));
}

TEST_F(HandoffTest, GrantsThatMakeNoSenseAreRefused) {
  Start();
  const auto grant = [&](int64_t position, int64_t reserve) {
    HandoffGrant g;
    g.request_id = "r1";
    g.position = position;
    if (reserve > 0) g.buffers = *HandoffBuffers::Reserve(receive_pools_, reserve);
    return receiver_->Grant(std::move(g)).status().code();
  };
  EXPECT_EQ(grant(0, 64), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(grant(65, 640), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(grant(128, 64), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(grant(64, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(grant(64, 64), absl::StatusCode::kOk);
  receiver_->Revoke("r1");
  ExpectBaseline();
}

TEST_F(HandoffTest, ReserveLeavesNothingBehindWhenAPoolIsFull) {
  EXPECT_EQ(HandoffBuffers::Reserve(receive_pools_, (kBlocks + 1) * kBlockTokens).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(receive_pools_.slabs->free_slots(), kSlabs);
  EXPECT_EQ(receive_pools_.blocks->free_slots(), kBlocks);
}

TEST_F(HandoffTest, LandingsThatMakeNoSenseAreRefused) {
  Start();
  const mesh::Landing good = Grant();
  mesh::Landing bad = good;
  bad.set_position(65);
  EXPECT_EQ(Begin(bad).code(), absl::StatusCode::kInvalidArgument);
  bad = good;
  bad.set_have_blocks(4);
  EXPECT_EQ(Begin(bad).code(), absl::StatusCode::kInvalidArgument);
  bad = good;
  bad.clear_transport_address();
  EXPECT_EQ(Begin(bad).code(), absl::StatusCode::kInvalidArgument);
  receiver_->Revoke("r1");
}

}  // namespace
}  // namespace deltamesh
