// Manifests and seals too long for a header: whatever becomes of their transfer meanwhile, their
// payload never has to land anywhere and never ends the process.

#include "tests/unit/transfer/raw_handoff.h"

namespace deltamesh {
namespace {

// So many regions that manifest and seal both travel in the payload.
class HandoffPayloadTest : public RawHandoffTest {
 protected:
  HandoffPayloadTest() : RawHandoffTest(InprocOptions{InprocDelivery::kQueued}) {
    layout_.mla_layers = 400;
    layout_.rank = 1;
    layout_.rope = 0;
  }

  // A good manifest, as the sender would put it into a payload.
  std::string ManifestPayload(const mesh::TransferKey& key) {
    mesh::Manifest manifest;
    *manifest.mutable_key() = key;
    manifest.set_request_id("r1");
    manifest.set_model_digest("abc");
    manifest.set_state_layout(kStateLayoutVersion);
    manifest.set_position(kPosition);
    const RegionPlan plan(layout_, kPosition, 0);
    for (int64_t i = 0; i < plan.size(); ++i) *manifest.add_regions() = plan.At(i);
    return manifest.SerializeAsString();
  }
  std::string SealPayload(const mesh::TransferKey& key) {
    mesh::Seal seal;
    *seal.mutable_key() = key;
    for (int64_t i = 0; i < RegionPlan(layout_, kPosition, 0).size(); ++i)
      seal.add_region_crc32c(0);
    return seal.SerializeAsString();
  }

  // `payload` with the key alone in the header.
  void SendRaw(MessageType type, const mesh::TransferKey& key, const std::string& payload) {
    mesh::Seal header;  // any of the messages: the key is field 1 in each
    *header.mutable_key() = key;
    raw_->Send(peer_, type, header.SerializeAsString(),
               std::as_bytes(std::span<const char>(payload.data(), payload.size())),
               [](absl::Status) {});
    Settle();
  }

  mesh::RefusalReason LastReason() const { return verdicts_.back().reason(); }
};

TEST_F(HandoffPayloadTest, UnknownTransfer) {
  StartRaw();
  mesh::TransferKey key = TransferKeyOf(Grant());
  key.set_transfer_id(key.transfer_id() ^ 1);
  for (const MessageType type : {MessageType::kHandoffManifest, MessageType::kHandoffSeal}) {
    SendRaw(type, key, ManifestPayload(key));
    EXPECT_EQ(LastReason(), mesh::UNKNOWN_TRANSFER);
  }
  EXPECT_EQ(receive_transport_->stats().dropped, 2u);
  EXPECT_EQ(receiver_->stats().open, 1) << "the true landing is untouched";
  receiver_->Revoke("r1");
  ExpectBaseline();
}

TEST_F(HandoffPayloadTest, HeaderThatDoesNotParse) {
  StartRaw();
  const std::string payload(5000, 'x');
  for (const MessageType type : {MessageType::kHandoffManifest, MessageType::kHandoffSeal}) {
    raw_->Send(peer_, type, "\xff\xff", std::as_bytes(std::span<const char>(payload)),
               [](absl::Status) {});
    Settle();
    EXPECT_EQ(LastReason(), mesh::MALFORMED);
  }
  EXPECT_EQ(receive_transport_->stats().dropped, 2u);
}

TEST_F(HandoffPayloadTest, RevokedBeforeAndWhileTheManifestArrives) {
  StartRaw();
  const mesh::TransferKey key = TransferKeyOf(Grant());
  receiver_->Revoke("r1");
  SendRaw(MessageType::kHandoffManifest, key, ManifestPayload(key));
  EXPECT_EQ(LastReason(), mesh::UNKNOWN_TRANSFER);
  SendRaw(MessageType::kHandoffSeal, key, SealPayload(key));
  ExpectBaseline();
}

TEST_F(HandoffPayloadTest, SecondManifest) {
  StartRaw();
  const mesh::TransferKey key = TransferKeyOf(Grant());
  SendRaw(MessageType::kHandoffManifest, key, ManifestPayload(key));
  EXPECT_EQ(LastReason(), mesh::NONE);
  SendRaw(MessageType::kHandoffManifest, key, ManifestPayload(key));
  EXPECT_EQ(LastReason(), mesh::UNKNOWN_TRANSFER);
  EXPECT_EQ(refused_.size(), 1u);
  EXPECT_EQ(receive_transport_->stats().dropped, 1u);
  ExpectBaseline();
}

TEST_F(HandoffPayloadTest, SecondSeal) {
  StartRaw();
  const mesh::TransferKey key = TransferKeyOf(Grant());
  SendRaw(MessageType::kHandoffManifest, key, ManifestPayload(key));
  SendRaw(MessageType::kHandoffSeal, key, SealPayload(key));
  EXPECT_TRUE(refused_.empty()) << "a seal may overtake data";
  SendRaw(MessageType::kHandoffSeal, key, SealPayload(key));
  ASSERT_EQ(refused_.size(), 1u);
  SendRaw(MessageType::kHandoffSeal, key, SealPayload(key));  // of a transfer that has failed
  EXPECT_EQ(receive_transport_->stats().dropped, 1u);
  ExpectBaseline();
}

TEST_F(HandoffPayloadTest, SealBeforeTheManifest) {
  StartRaw();
  const mesh::TransferKey key = TransferKeyOf(Grant());
  SendRaw(MessageType::kHandoffSeal, key, SealPayload(key));
  EXPECT_EQ(LastReason(), mesh::MALFORMED);
  EXPECT_EQ(receive_transport_->stats().dropped, 1u);
  refused_.clear();
  ExpectBaseline();
}

// Either end gives up at any moment; a doubled message makes every one of them come late once, too.
TEST_F(HandoffPayloadTest, CancelAtAnyMoment) {
  const int64_t segments = RegionPlan(layout_, kPosition, 0).size() + 60;
  std::vector<int64_t> moments;
  for (int64_t i = 0; i < 8; ++i) moments.push_back(i);
  for (int64_t i = 8; i < 3 * segments; i += 211) moments.push_back(i);
  const MessageType kNone = MessageType::kProbe;  // never sent here
  for (const MessageType doubled :
       {kNone, MessageType::kHandoffManifest, MessageType::kHandoffSeal}) {
    for (const bool at_receiver : {false, true}) {
      for (const int64_t moment : moments) {
        SCOPED_TRACE(absl::StrFormat("%d steps, %s, type %d doubled", moment,
                                     at_receiver ? "revoke" : "cancel", static_cast<int>(doubled)));
        TearDown();
        refused_.clear();
        completed_.clear();
        network_ = std::make_unique<InprocNetwork>(InprocOptions{
            InprocDelivery::kQueued, /*reorder=*/true, static_cast<uint64_t>(moment) + 1});
        network_->SetFault(
            [&](const InprocMessage& m) { return InprocFault{.duplicate = m.type == doubled}; });
        Start();
        ASSERT_TRUE(Begin(Grant()).ok());
        GiveAll();
        network_->DeliverAll(moment);
        if (at_receiver) receiver_->Revoke("r1");
        if (!at_receiver) sender_->Cancel("r1");
        Settle();
        receiver_->Revoke("r1");
        Settle();
        ExpectBaseline();
      }
    }
  }
}

// A handler that gives a buffer of another size: dropped, counted, told, and life goes on.
class WrongLanding final : public MessageHandler {
 public:
  explicit WrongLanding(size_t bytes) : buffer_(bytes) {}
  absl::StatusOr<PayloadTarget> OnMessage(const Arrival&) override {
    return PayloadTarget{buffer_,
                         [this](absl::Status status) { told_.push_back(std::move(status)); }};
  }
  void OnPeerLost(PeerId, const absl::Status&) override {}

  std::vector<std::byte> buffer_;
  std::vector<absl::Status> told_;
};

TEST(InprocLandingTest, WrongSizeIsDroppedAndCounted) {
  for (const InprocDelivery delivery : {InprocDelivery::kInline, InprocDelivery::kQueued}) {
    for (const size_t size : {size_t{0}, size_t{99}, size_t{101}}) {
      InprocNetwork network(InprocOptions{delivery});
      WrongLanding handler(size);
      auto from = *network.Open("from");
      auto to = *network.Open("to");
      to->SetHandler(MessageType::kProbe, &handler);
      const std::vector<std::byte> payload(100);
      int sent = 0;
      from->Send(*from->Connect("to"), MessageType::kProbe, "h", payload,
                 [&](const absl::Status& status) { sent += status.ok(); });
      network.DeliverAll();
      EXPECT_EQ(sent, 1);
      EXPECT_EQ(to->stats().dropped, 1u);
      EXPECT_EQ(to->stats().messages_received, 0u);
      ASSERT_EQ(handler.told_.size(), 1u);
      EXPECT_EQ(handler.told_[0].code(), absl::StatusCode::kInternal);
    }
  }
}

}  // namespace
}  // namespace deltamesh
