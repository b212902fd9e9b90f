// Everything that can be wrong with a hand-off is refused by name, counted, and leaves nothing
// behind.

#include "runtime/base/crc32c.h"
#include "tests/unit/transfer/raw_handoff.h"

namespace deltamesh {
namespace {

uint32_t Crc32cOfZeros(size_t size) { return Crc32c(std::vector<std::byte>(size)); }

class HandoffRefusalTest : public RawHandoffTest {
 protected:
  mesh::Manifest GoodManifest(const mesh::Landing& landing) {
    mesh::Manifest manifest;
    *manifest.mutable_key() = TransferKeyOf(landing);
    manifest.set_request_id("r1");
    manifest.set_model_digest("abc");
    manifest.set_state_layout(kStateLayoutVersion);
    manifest.set_position(kPosition);
    const RegionPlan plan(layout_, kPosition, static_cast<int64_t>(landing.have_blocks()));
    for (int64_t i = 0; i < plan.size(); ++i) *manifest.add_regions() = plan.At(i);
    return manifest;
  }

  void SendRaw(MessageType type, const google::protobuf::Message& message,
               std::span<const std::byte> payload = {}) {
    raw_->Send(peer_, type, message.SerializeAsString(), payload, [](absl::Status) {});
  }

  void ExpectRawRefusal(mesh::RefusalReason reason, mesh::Verdict::Stage stage) {
    ASSERT_FALSE(verdicts_.empty());
    EXPECT_EQ(ReasonName(verdicts_.back().reason()), ReasonName(reason))
        << verdicts_.back().detail();
    EXPECT_EQ(verdicts_.back().stage(), stage);
    ASSERT_EQ(refused_.size(), 1u);
    EXPECT_EQ(ReasonName(refused_[0].reason), ReasonName(reason)) << refused_[0].detail;
    EXPECT_EQ(receiver_->stats().refused[reason], 1u);
    EXPECT_TRUE(completed_.empty());
    ExpectBaseline();
  }

  // The manifest after `change` is refused as `reason`.
  void ManifestRefused(mesh::RefusalReason reason,
                       const std::function<void(mesh::Manifest&)>& change) {
    StartRaw();
    mesh::Manifest manifest = GoodManifest(Grant());
    change(manifest);
    SendRaw(MessageType::kHandoffManifest, manifest);
    ExpectRawRefusal(reason, mesh::Verdict::MANIFEST);
  }

  // A good manifest was accepted; a segment of region 0 after `change` is refused as `reason`.
  void SegmentRefused(mesh::RefusalReason reason,
                      const std::function<void(mesh::Segment&)>& change) {
    StartRaw();
    const mesh::Landing landing = Grant();
    SendRaw(MessageType::kHandoffManifest, GoodManifest(landing));
    ASSERT_EQ(verdicts_.size(), 1u);
    ASSERT_EQ(verdicts_[0].reason(), mesh::NONE);
    const auto bytes =
        std::as_bytes(BlockLatentsSpan(layout_, source_->state->blocks()[0].data(), 0));
    mesh::Segment segment;
    *segment.mutable_key() = TransferKeyOf(landing);
    segment.set_length(bytes.size());
    change(segment);
    SendRaw(MessageType::kHandoffSegment, segment, bytes);
    ExpectRawRefusal(reason, mesh::Verdict::SEGMENT);
  }
};

TEST_F(HandoffRefusalTest, FlippedPayloadByte) {
  for (int64_t segment : {0, 3, 11}) {
    SCOPED_TRACE(segment);
    TearDown();
    sent_.clear();
    network_ = std::make_unique<InprocNetwork>();
    FaultOn(MessageType::kHandoffSegment, segment,
            {.flip_payload_byte = 4097 * segment + 5, .flip_mask = 0x80});
    Start();
    Run();
    ExpectRefused(mesh::CHECKSUM);
  }
}

// The same flip with checksums off: it is accepted, so the test above sees the checksum and nothing
// else.
TEST_F(HandoffRefusalTest, FlippedPayloadByteIsAcceptedWithoutChecksums) {
  receiver_options_.verify_checksums = false;
  FaultOn(MessageType::kHandoffSegment, 3, {.flip_payload_byte = 5, .flip_mask = 0x80});
  Start();
  Run();
  ASSERT_EQ(completed_.size(), 1u);
  const auto size = static_cast<size_t>(layout_.block_floats());
  bool same = true;
  for (int64_t b = 0; b < kPosition / kBlockTokens; ++b) {
    same &= SameBits({completed_[0].state->blocks()[b].data(), size},
                     {source_->state->blocks()[b].data(), size});
  }
  EXPECT_FALSE(same);
}

TEST_F(HandoffRefusalTest, SealWithAnotherChecksum) {
  StartRaw();
  const mesh::Landing landing = Grant();
  SendRaw(MessageType::kHandoffManifest, GoodManifest(landing));
  // Nothing but the seal is wrong: all content arrives with the right checksums.
  const RegionPlan plan(layout_, kPosition, 0);
  std::vector<std::vector<std::byte>> content;
  for (int64_t i = 0; i < plan.size(); ++i) {
    content.emplace_back(plan.At(i).bytes());
    mesh::Segment segment;
    *segment.mutable_key() = TransferKeyOf(landing);
    segment.set_region(static_cast<uint32_t>(i));
    segment.set_length(content.back().size());
    segment.set_crc32c(Crc32cOfZeros(content.back().size()));
    SendRaw(MessageType::kHandoffSegment, segment, content.back());
  }
  mesh::Seal seal;
  *seal.mutable_key() = TransferKeyOf(landing);
  for (int64_t i = 0; i < plan.size(); ++i)
    seal.add_region_crc32c(Crc32cOfZeros(plan.At(i).bytes()) + (i == 4));
  SendRaw(MessageType::kHandoffSeal, seal);
  ExpectRawRefusal(mesh::CHECKSUM, mesh::Verdict::SEAL);
}

TEST_F(HandoffRefusalTest, SealOfTheWrongLength) {
  StartRaw();
  const mesh::Landing landing = Grant();
  SendRaw(MessageType::kHandoffManifest, GoodManifest(landing));
  mesh::Seal seal;
  *seal.mutable_key() = TransferKeyOf(landing);
  SendRaw(MessageType::kHandoffSeal, seal);
  ExpectRawRefusal(mesh::MALFORMED, mesh::Verdict::SEAL);
}

TEST_F(HandoffRefusalTest, SealOfMoreRestoredThanThereIs) {
  StartRaw();
  const mesh::Landing landing = Grant();
  SendRaw(MessageType::kHandoffManifest, GoodManifest(landing));
  mesh::Seal seal;
  *seal.mutable_key() = TransferKeyOf(landing);
  for (int64_t i = 0; i < RegionPlan(layout_, kPosition, 0).size(); ++i) seal.add_region_crc32c(1);
  seal.set_restored_tokens(kPosition + 1);
  SendRaw(MessageType::kHandoffSeal, seal);
  ExpectRawRefusal(mesh::WRONG_COUNT, mesh::Verdict::SEAL);
}

TEST_F(HandoffRefusalTest, MissingRegion) {
  ManifestRefused(mesh::WRONG_REGION, [](mesh::Manifest& m) { m.mutable_regions()->RemoveLast(); });
}
TEST_F(HandoffRefusalTest, ExtraRegion) {
  ManifestRefused(mesh::WRONG_REGION, [](mesh::Manifest& m) { *m.add_regions() = m.regions(0); });
}
TEST_F(HandoffRefusalTest, RegionTwiceInsteadOfAnother) {
  ManifestRefused(mesh::WRONG_REGION, [](mesh::Manifest& m) {
    *m.mutable_regions(1) = m.regions(0);
    m.mutable_regions(1)->set_index(1);
  });
}
TEST_F(HandoffRefusalTest, RegionOfALayerThatIsNotThere) {
  ManifestRefused(mesh::WRONG_REGION,
                  [](mesh::Manifest& m) { m.mutable_regions(0)->set_layer(2); });
}
TEST_F(HandoffRefusalTest, RegionOfABlockBeyondThePosition) {
  ManifestRefused(mesh::WRONG_REGION,
                  [](mesh::Manifest& m) { m.mutable_regions(0)->set_block(3); });
}
TEST_F(HandoffRefusalTest, RegionOfUnknownKind) {
  ManifestRefused(mesh::WRONG_REGION, [](mesh::Manifest& m) {
    m.mutable_regions(0)->set_kind(mesh::REGION_KIND_UNSPECIFIED);
  });
}
TEST_F(HandoffRefusalTest, RegionIndexOutOfPlace) {
  ManifestRefused(mesh::WRONG_REGION,
                  [](mesh::Manifest& m) { m.mutable_regions(0)->set_index(1); });
}
TEST_F(HandoffRefusalTest, RegionOfAnotherSize) {
  ManifestRefused(mesh::WRONG_REGION, [](mesh::Manifest& m) {
    m.mutable_regions(0)->set_bytes(m.regions(0).bytes() - 4);
  });
}
TEST_F(HandoffRefusalTest, RegionOfAnotherElementType) {
  ManifestRefused(mesh::WRONG_REGION,
                  [](mesh::Manifest& m) { m.mutable_regions(0)->set_dtype(mesh::BFLOAT16); });
}
TEST_F(HandoffRefusalTest, HalfTheHeads) {
  ManifestRefused(mesh::WRONG_REGION, [](mesh::Manifest& m) {
    for (auto& region : *m.mutable_regions()) {
      if (region.kind() == mesh::KDA_STATE) region.set_head_end(2);
    }
  });
}
TEST_F(HandoffRefusalTest, RegionAtAnotherTokenCount) {
  ManifestRefused(mesh::WRONG_COUNT,
                  [](mesh::Manifest& m) { m.mutable_regions(7)->set_token_count(kPosition - 16); });
}
TEST_F(HandoffRefusalTest, StateAtAnotherPosition) {
  ManifestRefused(mesh::WRONG_COUNT, [](mesh::Manifest& m) { m.set_position(kPosition - 64); });
}
TEST_F(HandoffRefusalTest, AnotherModel) {
  ManifestRefused(mesh::WRONG_MODEL, [](mesh::Manifest& m) { m.set_model_digest("abd"); });
}
TEST_F(HandoffRefusalTest, AnotherStateLayout) {
  ManifestRefused(mesh::WRONG_LAYOUT,
                  [](mesh::Manifest& m) { m.set_state_layout(kStateLayoutVersion + 1); });
}
TEST_F(HandoffRefusalTest, AnotherRequest) {
  ManifestRefused(mesh::UNKNOWN_TRANSFER, [](mesh::Manifest& m) { m.set_request_id("r2"); });
}
TEST_F(HandoffRefusalTest, ManifestOfAnEarlierLife) {
  ManifestRefused(mesh::STALE_EPOCH,
                  [](mesh::Manifest& m) { m.mutable_key()->set_receiver_epoch(4); });
}

TEST_F(HandoffRefusalTest, SegmentOfAnEarlierLife) {
  SegmentRefused(mesh::STALE_EPOCH,
                 [](mesh::Segment& s) { s.mutable_key()->set_receiver_epoch(4); });
}
TEST_F(HandoffRefusalTest, SegmentOfNoRegion) {
  SegmentRefused(mesh::WRONG_RANGE, [](mesh::Segment& s) { s.set_region(12); });
}
TEST_F(HandoffRefusalTest, SegmentBeyondItsRegion) {
  SegmentRefused(mesh::WRONG_RANGE, [](mesh::Segment& s) { s.set_offset(4); });
}
TEST_F(HandoffRefusalTest, SegmentWhoseEndOverflows) {
  SegmentRefused(mesh::WRONG_RANGE, [](mesh::Segment& s) { s.set_offset(~uint64_t{0} - 7); });
}
TEST_F(HandoffRefusalTest, SegmentWhosePayloadHasAnotherLength) {
  SegmentRefused(mesh::WRONG_RANGE, [](mesh::Segment& s) { s.set_length(s.length() - 4); });
}

TEST_F(HandoffRefusalTest, EmptySegment) {
  StartRaw();
  const mesh::Landing landing = Grant();
  SendRaw(MessageType::kHandoffManifest, GoodManifest(landing));
  mesh::Segment segment;
  *segment.mutable_key() = TransferKeyOf(landing);
  SendRaw(MessageType::kHandoffSegment, segment);
  ExpectRawRefusal(mesh::WRONG_RANGE, mesh::Verdict::SEGMENT);
}

TEST_F(HandoffRefusalTest, CrumbsAreRefused) {
  StartRaw();
  const mesh::Landing landing = Grant();
  SendRaw(MessageType::kHandoffManifest, GoodManifest(landing));
  const std::vector<std::byte> crumb(8);
  mesh::Segment segment;
  *segment.mutable_key() = TransferKeyOf(landing);
  segment.set_length(crumb.size());
  SendRaw(MessageType::kHandoffSegment, segment, crumb);
  ExpectRawRefusal(mesh::WRONG_RANGE, mesh::Verdict::SEGMENT);
}

TEST_F(HandoffRefusalTest, DataBeforeTheManifest) {
  StartRaw();
  mesh::Segment segment;
  *segment.mutable_key() = TransferKeyOf(Grant());
  SendRaw(MessageType::kHandoffSegment, segment);
  ExpectRawRefusal(mesh::MALFORMED, mesh::Verdict::SEGMENT);
}

TEST_F(HandoffRefusalTest, OversizedManifestIsNotBuffered) {
  StartRaw();
  mesh::Manifest key_only;
  *key_only.mutable_key() = TransferKeyOf(Grant());
  const std::vector<std::byte> big(1 << 20);
  SendRaw(MessageType::kHandoffManifest, key_only, big);
  ExpectRawRefusal(mesh::MALFORMED, mesh::Verdict::MANIFEST);
}

TEST_F(HandoffRefusalTest, GarbageHeaderFailsWhatTheConnectionCarries) {
  StartRaw();
  SendRaw(MessageType::kHandoffManifest, GoodManifest(Grant()));
  raw_->Send(peer_, MessageType::kHandoffSegment, "\xff\xff\xff garbage", {}, [](absl::Status) {});
  ExpectRawRefusal(mesh::MALFORMED, mesh::Verdict::SEGMENT);
}

// A wrong id or token is nobody's transfer: refused and counted, and the true transfer goes on.
TEST_F(HandoffRefusalTest, WrongIdOrTokenDoesNotTouchTheTransfer) {
  StartRaw();
  const mesh::Landing landing = Grant();
  for (int field = 0; field < 3; ++field) {
    mesh::Manifest manifest = GoodManifest(landing);
    mesh::TransferKey& key = *manifest.mutable_key();
    if (field == 0) key.set_transfer_id(key.transfer_id() ^ 1);
    if (field == 1) key.set_token_low(key.token_low() ^ (uint64_t{1} << 40));
    if (field == 2) key.set_token_high(key.token_high() ^ 1);
    SendRaw(MessageType::kHandoffManifest, manifest);
    EXPECT_EQ(verdicts_.back().reason(), mesh::UNKNOWN_TRANSFER);
  }
  EXPECT_EQ(receiver_->stats().refused[mesh::UNKNOWN_TRANSFER], 3u);
  EXPECT_TRUE(refused_.empty());
  ASSERT_TRUE(Begin(landing).ok());
  GiveAll();
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
}

TEST_F(HandoffRefusalTest, AnotherConnectionCannotJoinATransfer) {
  StartRaw();
  const mesh::Landing landing = Grant();
  ASSERT_TRUE(Begin(landing).ok());
  mesh::Segment segment;
  *segment.mutable_key() = TransferKeyOf(landing);
  SendRaw(MessageType::kHandoffSegment, segment);
  EXPECT_EQ(verdicts_.back().reason(), mesh::UNKNOWN_TRANSFER);
  GiveAll();
  ASSERT_EQ(completed_.size(), 1u);
}

TEST_F(HandoffRefusalTest, ReplayedTransferIsUnknown) {
  StartRaw();
  const mesh::Landing landing = Grant();
  ASSERT_TRUE(Begin(landing).ok());
  GiveAll();
  ASSERT_EQ(completed_.size(), 1u);
  SendRaw(MessageType::kHandoffManifest, GoodManifest(landing));
  EXPECT_EQ(verdicts_.back().reason(), mesh::UNKNOWN_TRANSFER);
  EXPECT_EQ(receiver_->stats().refused[mesh::UNKNOWN_TRANSFER], 1u);
  EXPECT_EQ(completed_.size(), 1u);
}

TEST_F(HandoffRefusalTest, LandingOfAnEarlierLifeIsStale) {
  StartRaw();
  mesh::Landing landing = Grant();
  landing.set_receiver_epoch(4);
  landing.set_transfer_id(12345);
  ASSERT_TRUE(Begin(landing).ok());
  ExpectSentOnce(mesh::STALE_EPOCH);
  EXPECT_EQ(sent_[0].status.code(), absl::StatusCode::kFailedPrecondition);
  receiver_->Revoke("r1");
}

TEST_F(HandoffRefusalTest, DuplicateSegment) {
  FaultOn(MessageType::kHandoffSegment, 2, {.duplicate = true});
  Start();
  Run();
  ExpectRefused(mesh::WRONG_RANGE);
}

TEST_F(HandoffRefusalTest, DuplicateManifest) {
  network_ = std::make_unique<InprocNetwork>(InprocOptions{InprocDelivery::kQueued});
  FaultOn(MessageType::kHandoffManifest, 0, {.duplicate = true});
  Start();
  Run();
  ExpectRefused(mesh::UNKNOWN_TRANSFER);
}

TEST_F(HandoffRefusalTest, DroppedManifestTimesOut) {
  FaultOn(MessageType::kHandoffManifest, 0, {.drop = true});
  Start();
  Run();
  EXPECT_TRUE(sent_.empty());
  PassTime(kHandoffIdleMax);
  ExpectSentOnce(mesh::TIMEOUT);
  EXPECT_TRUE(refused_.empty()) << "the receiver cannot tell it from a sender that comes later";
  PassTime(receiver_options_.unclaimed_max);
  ExpectRefused(mesh::TIMEOUT);
}

TEST_F(HandoffRefusalTest, DroppedSegmentIsIncomplete) {
  FaultOn(MessageType::kHandoffSegment, 4, {.drop = true});
  Start();
  Run();
  EXPECT_TRUE(refused_.empty()) << "a seal may overtake data";
  PassTime(absl::Seconds(3));
  ExpectRefused(mesh::INCOMPLETE);
}

TEST_F(HandoffRefusalTest, DroppedSealTimesOut) {
  FaultOn(MessageType::kHandoffSeal, 0, {.drop = true});
  Start();
  Run();
  PassTime(absl::Seconds(61));
  ExpectRefused(mesh::TIMEOUT);
}

TEST_F(HandoffRefusalTest, DroppedVerdictLeavesOnlyTheSenderInDoubt) {
  FaultOn(MessageType::kHandoffVerdict, 1, {.drop = true});
  Start();
  Run();
  ASSERT_EQ(completed_.size(), 1u);
  ExpectWhole(*completed_[0].state);
  PassTime(absl::Seconds(61));
  ExpectSentOnce(mesh::TIMEOUT);
  ExpectBaseline();
}

TEST_F(HandoffRefusalTest, PayloadThatFailsToArrive) {
  FaultOn(MessageType::kHandoffSegment, 4, {.fail_payload = true});
  Start();
  Run();
  ExpectRefused(mesh::PEER_LOST);
}

TEST_F(HandoffRefusalTest, RetryWithTheSameBuffers) {
  FaultOn(MessageType::kHandoffSegment, 4, {.flip_payload_byte = 9});
  Start();
  Run();
  ASSERT_EQ(refused_.size(), 1u);
  HandoffGrant grant;
  grant.request_id = "r1";
  grant.serial = 1;
  grant.position = kPosition;
  grant.buffers = std::move(refused_[0].buffers);
  const mesh::Landing landing = *receiver_->Grant(std::move(grant));
  ASSERT_TRUE(Begin(landing, "r1", 1).ok());
  GiveAll();
  ASSERT_EQ(completed_.size(), 1u);
  EXPECT_EQ(completed_[0].serial, 1u);
  ExpectWhole(*completed_[0].state);
  ExpectBaseline();
}

// Property: whatever byte of whatever message is hit, either the state arrives whole or the
// hand-off is refused, and nothing is left behind.
TEST_F(HandoffRefusalTest, AnyFlippedHeaderByteNeverYieldsAWrongState) {
  const MessageType types[] = {MessageType::kHandoffManifest, MessageType::kHandoffSegment,
                               MessageType::kHandoffSeal, MessageType::kHandoffVerdict};
  int64_t whole = 0, refused = 0;
  for (const MessageType type : types) {
    const int64_t numbers = type == MessageType::kHandoffSegment ? 3 : 1;
    for (int64_t number = 0; number < numbers; ++number) {
      for (int64_t offset = 0; offset < (type == MessageType::kHandoffManifest ? 320 : 64);
           ++offset) {
        SCOPED_TRACE(
            absl::StrFormat("type %d message %d byte %d", static_cast<int>(type), number, offset));
        TearDown();
        sent_.clear();
        network_ = std::make_unique<InprocNetwork>();
        FaultOn(
            type, number,
            {.flip_header_byte = offset, .flip_mask = static_cast<uint8_t>(1u << (offset % 8))});
        Start();
        Run();
        PassTime(absl::Minutes(11));
        ASSERT_EQ(completed_.size() + refused_.size(), 1u);
        ASSERT_EQ(sent_.size(), 1u);
        if (!completed_.empty()) ExpectWhole(*completed_[0].state);
        whole += static_cast<int64_t>(completed_.size());
        refused += static_cast<int64_t>(refused_.size());
        ExpectBaseline();
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_GT(refused, 400);
  EXPECT_GT(whole, 0);
}

}  // namespace
}  // namespace deltamesh
