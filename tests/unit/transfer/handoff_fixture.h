// A sender and a receiver over an in-process network, with a clock the test moves.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/transfer/handoff_receiver.h"
#include "runtime/transfer/handoff_sender.h"
#include "runtime/transfer/inproc_transport.h"

namespace deltamesh {

class ManualClock final : public Clock {
 public:
  absl::Time Now() const override { return now_; }
  void Advance(absl::Duration d) { now_ += d; }

 private:
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
};

// Small, with every kind of region; S is 16 KiB per layer, so that a small segment limit cuts it.
inline StateLayout SmallLayout() {
  StateLayout layout;
  layout.kda_layers = 3;
  layout.heads = 4;
  layout.dim = 32;
  layout.conv_taps = 4;
  layout.mla_layers = 2;
  layout.rank = 40;
  layout.rope = 5;
  return layout;
}

// A number for each (kind, layer, block, element); any two differ in some bits.
inline void FillPattern(std::span<float> out, uint32_t salt) {
  for (size_t i = 0; i < out.size(); ++i) {
    uint32_t x = salt * 0x9E3779B9u + static_cast<uint32_t>(i) * 0x85EBCA6Bu + 1;
    x ^= x >> 15;
    x *= 0x2C1B3C6Du;
    x ^= x >> 12;
    std::memcpy(&out[i], &x, 4);  // any bits: also NaNs must arrive as they are
  }
}

inline bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

struct Source {
  std::unique_ptr<SequenceState> state;

  Source(const StatePools& pools, int64_t position) {
    auto created = SequenceState::Create(pools);
    CHECK_OK(created.status());
    state = *std::move(created);
    CHECK_OK(state->Reserve(position));
    state->Advance(position);
    const StateLayout& l = pools.layout;
    FillPattern({state->slab().data(), static_cast<size_t>(l.slab_floats())}, 7);
    for (size_t b = 0; b < state->blocks().size(); ++b) {
      FillPattern({state->blocks()[b].data(), static_cast<size_t>(l.block_floats())},
                  100 + static_cast<uint32_t>(b));
    }
  }
};

class HandoffTest : public ::testing::Test {
 protected:
  static constexpr int64_t kPosition = 3 * kBlockTokens;
  static constexpr int64_t kSlabs = 4;
  static constexpr int64_t kBlocks = 24;

  explicit HandoffTest(InprocOptions network = {})
      : network_(std::make_unique<InprocNetwork>(network)) {}

  void SetUp() override {
    send_pools_ = *StatePools::Create(layout_, kSlabs, kBlocks);
    receive_pools_ = *StatePools::Create(layout_, kSlabs, kBlocks);
    source_ = std::make_unique<Source>(send_pools_, kPosition);
    receiver_options_.name = "decode-0";
    receiver_options_.epoch = 5;
    receiver_options_.identity.digest = "abc";
    receiver_options_.layout = layout_;
    sender_options_.name = "prefill-0";
    sender_options_.epoch = 9;
    sender_options_.identity.digest = "abc";
    sender_options_.layout = layout_;
    sender_options_.segment_bytes_max = 6000;  // several segments in most regions, odd ends
  }

  // Opens both ends; options are final from here.
  void Start() {
    send_transport_ = *network_->Open("prefill-0");
    receive_transport_ = *network_->Open("decode-0");
    sender_ =
        std::make_unique<HandoffSender>(send_transport_.get(), &clock_, sender_options_,
                                        [this](HandoffSent s) { sent_.push_back(std::move(s)); });
    receiver_ = std::make_unique<HandoffReceiver>(receive_transport_.get(), &clock_, &entropy_,
                                                  receiver_options_, [this](HandoffEvent e) {
                                                    if (auto* c = std::get_if<HandoffCompleted>(&e))
                                                      completed_.push_back(std::move(*c));
                                                    if (auto* r = std::get_if<HandoffRefused>(&e))
                                                      refused_.push_back(std::move(*r));
                                                  });
  }

  void TearDown() override {
    send_transport_.reset();
    receive_transport_.reset();
  }

  mesh::Landing Grant(const std::string& id = "r1", uint32_t serial = 0) {
    auto buffers = HandoffBuffers::Reserve(receive_pools_, kPosition + 10);
    CHECK_OK(buffers.status());
    HandoffGrant grant;
    grant.request_id = id;
    grant.serial = serial;
    grant.position = kPosition;
    grant.buffers = *std::move(buffers);
    auto landing = receiver_->Grant(std::move(grant));
    CHECK_OK(landing.status());
    return *landing;
  }

  absl::Status Begin(const mesh::Landing& landing, const std::string& id = "r1",
                     uint32_t serial = 0) {
    HandoffStart start;
    start.request_id = id;
    start.serial = serial;
    start.landing = landing;
    return sender_->Begin(std::move(start));
  }

  void GiveAll(const std::string& id = "r1") {
    for (int64_t b = 0; b < kPosition / kBlockTokens; ++b)
      sender_->SendBlock(id, b, source_->state->blocks()[b]);
    for (int64_t l = 0; l < layout_.kda_layers; ++l)
      sender_->SendLayer(id, l, source_->state->slab());
  }

  // A whole hand-off of "r1".
  void Run() {
    CHECK_OK(Begin(Grant()));
    GiveAll();
    Settle();
  }

  void Settle() { network_->DeliverAll(); }

  void PassTime(absl::Duration d) {
    clock_.Advance(d);
    receiver_->Tick(clock_.Now());
    sender_->Tick(clock_.Now());
    Settle();
    receiver_->Tick(clock_.Now());
    sender_->Tick(clock_.Now());
    Settle();
  }

  // Every region of `state` has the source's bits.
  void ExpectWhole(const SequenceState& state) {
    ASSERT_EQ(state.position(), kPosition);
    for (int64_t l = 0; l < layout_.kda_layers; ++l) {
      EXPECT_TRUE(SameBits(SlabStateSpan(layout_, state.slab().data(), l),
                           SlabStateSpan(layout_, source_->state->slab().data(), l)))
          << "S of layer " << l;
      EXPECT_TRUE(SameBits(SlabConvSpan(layout_, state.slab().data(), l),
                           SlabConvSpan(layout_, source_->state->slab().data(), l)))
          << "conv of layer " << l;
      const SlabLayer layer = state.slab_layer(l);
      for (int64_t i = 0; i < layout_.decay_floats(); ++i) ASSERT_EQ(layer.decay[i], 1.0f);
      for (int64_t i = 0; i < layout_.u_floats(); ++i) ASSERT_EQ(layer.u[i], 0.0f);
    }
    for (int64_t b = 0; b < kPosition / kBlockTokens; ++b) {
      const auto size = static_cast<size_t>(layout_.block_floats());
      EXPECT_TRUE(
          SameBits({state.blocks()[b].data(), size}, {source_->state->blocks()[b].data(), size}))
          << "block " << b;
    }
  }

  // The hand-off was refused as `reason`: reported once, counted once, and nothing is held
  // afterwards.
  void ExpectRefused(mesh::RefusalReason reason) {
    ASSERT_TRUE(completed_.empty());
    ASSERT_EQ(refused_.size(), 1u);
    EXPECT_EQ(ReasonName(refused_[0].reason), ReasonName(reason)) << refused_[0].detail;
    EXPECT_FALSE(refused_[0].detail.empty());
    EXPECT_EQ(refused_[0].request_id, "r1");
    EXPECT_EQ(refused_[0].retryable, ReasonRetryable(reason));
    EXPECT_TRUE(static_cast<bool>(refused_[0].buffers));
    EXPECT_EQ(receiver_->stats().refused[reason], 1u);
    EXPECT_EQ(receiver_->stats().completed, 0u);
    ExpectSentOnce(reason);
    ExpectBaseline();
  }

  void ExpectSentOnce(mesh::RefusalReason reason) {
    ASSERT_EQ(sent_.size(), 1u);
    EXPECT_EQ(ReasonName(sent_[0].reason), ReasonName(reason)) << sent_[0].status;
    EXPECT_EQ(sent_[0].status.code(), ReasonCode(reason));
  }

  // Pools are as before once the test lets go of what it was given.
  void ExpectBaseline() {
    refused_.clear();
    completed_.clear();
    EXPECT_EQ(receiver_->stats().open, 0);
    EXPECT_EQ(receiver_->stats().draining, 0);
    EXPECT_EQ(sender_->stats().open, 0);
    EXPECT_EQ(sender_->stats().draining, 0);
    EXPECT_EQ(receive_pools_.slabs->free_slots(), kSlabs);
    EXPECT_EQ(receive_pools_.blocks->free_slots(), kBlocks);
    EXPECT_EQ(source_->state->slab().use_count(), 1);
    for (const SlotRef& block : source_->state->blocks()) EXPECT_EQ(block.use_count(), 1);
  }

  // Applies `fault` to message `number` of `type`.
  void FaultOn(MessageType type, int64_t number, InprocFault fault) {
    network_->SetFault([=](const InprocMessage& m) {
      return m.type == type && m.number == number ? fault : InprocFault{};
    });
  }

  StateLayout layout_ = SmallLayout();
  ManualClock clock_;
  SeededEntropy entropy_{11};
  HandoffReceiverOptions receiver_options_;
  HandoffSenderOptions sender_options_;
  StatePools send_pools_, receive_pools_;
  std::unique_ptr<Source> source_;
  std::vector<HandoffSent> sent_;
  std::vector<HandoffCompleted> completed_;
  std::vector<HandoffRefused> refused_;
  std::unique_ptr<InprocNetwork> network_;
  std::unique_ptr<HandoffSender> sender_;
  std::unique_ptr<HandoffReceiver> receiver_;
  std::unique_ptr<Transport> send_transport_, receive_transport_;  // destroyed first
};

}  // namespace deltamesh
