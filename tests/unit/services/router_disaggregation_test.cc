// Whether a prompt is handed over or computed where it is decoded: by order, and by estimate.
#include <gtest/gtest.h>

#include "services/router/usual_overhead.h"
#include "tests/unit/services/router_harness.h"

namespace deltamesh {
namespace {

using testing::HasSubstr;

constexpr LinkId kPrefill = 1, kDecode = 2;
constexpr uint64_t kSlabBytes = 4 << 20;

class RouterDisaggregationTest : public RouterCoreTest {
 protected:
  void Begin(Disaggregation how, uint64_t block_bytes = 0, bool shared_processors = false) {
    RouterOptions options = DefaultOptions();
    options.shared_processors = shared_processors;
    options.disaggregation = how;
    Restart(options);
    for (const auto& [link, role] :
         {std::pair(kPrefill, mesh::ROLE_PREFILL), std::pair(kDecode, mesh::ROLE_DECODE)}) {
      mesh::WorkerMessage m = TestRegister(link == kPrefill ? "p" : "d", role);
      m.mutable_register_()->mutable_capacity()->set_slab_bytes(kSlabBytes);
      m.mutable_register_()->mutable_capacity()->set_block_bytes(block_bytes);
      m.mutable_register_()->mutable_capacity()->set_step_tokens(2048);
      Open(link, m);
    }
    Drain();
  }
  void Rates(double prefill, double decode, double prefill_mixed = 0, uint64_t running = 0) {
    for (const LinkId link : {kPrefill, kDecode}) {
      mesh::WorkerMessage m;
      mesh::Heartbeat* load = m.mutable_heartbeat();
      load->set_slabs_free(4);
      load->set_latent_blocks_free(64);
      if (link == kDecode) load->set_running(running);
      load->set_prompt_tokens_per_second(link == kPrefill ? prefill : decode);
      load->set_tokens_per_second(link == kPrefill ? prefill_mixed : 3);
      Send(link, m);
    }
  }
  // Whether the router hands the prompt over. The request ends at once.
  bool HandsOver(const std::string& id, int64_t prompt) {
    EXPECT_TRUE(Submit(id, prompt).ok());
    const std::string said = Drain();
    EXPECT_THAT(said, HasSubstr("StartDecode " + id));
    core->CancelClient(id, now);
    Drain();
    return said.find("handoff=0") == std::string::npos;
  }
  // One that is too short to be handed over.
  void Alone(const std::string& id, int64_t prompt, absl::Duration until_token) {
    ASSERT_TRUE(Submit(id, prompt).ok());
    Drain();
    now += until_token;
    Tokens(kDecode, id, {5}, 0, mesh::SequenceOutput::STOP_TOKEN);
    EXPECT_THAT(Drain(), HasSubstr("client " + id + " finished"));
  }
  // A request that is handed over at so many bytes a second, and whose first token comes after so long.
  void HandOver(const std::string& id, int64_t prompt, double bytes_per_second,
                absl::Duration until_token) {
    ASSERT_TRUE(Submit(id, prompt).ok());
    Drain();
    Grant(kDecode, id, static_cast<uint64_t>((prompt - 1) / 64 * 64), attempts[id]);
    Drain();
    mesh::WorkerMessage m;
    m.mutable_handoff_result()->set_request_id(id);
    m.mutable_handoff_result()->set_attempt(attempts[id]);
    m.mutable_handoff_result()->set_bytes(kSlabBytes);
    m.mutable_handoff_result()->set_seconds(static_cast<double>(kSlabBytes) / bytes_per_second);
    Send(kDecode, m);
    now += until_token;
    Tokens(kDecode, id, {5}, 0, mesh::SequenceOutput::STOP_TOKEN);
    EXPECT_THAT(Drain(), HasSubstr("client " + id + " finished"));
  }
};

TEST_F(RouterDisaggregationTest, AlwaysAndNeverAreObeyed) {
  Begin(Disaggregation::kAlways);
  Rates(1000, 1000000);
  EXPECT_TRUE(HandsOver("a", 200));
  EXPECT_FALSE(HandsOver("b", 64)) << "nothing to hand over";
  Begin(Disaggregation::kNever);
  Rates(1000000, 1000);
  EXPECT_FALSE(HandsOver("a", 200));
}

TEST_F(RouterDisaggregationTest, WithoutAnyRatePromptsAreHandedOver) {
  Begin(Disaggregation::kPlanned);
  EXPECT_TRUE(HandsOver("a", 200));
}

TEST_F(RouterDisaggregationTest, AShortPromptIsNotWorthMovingAState) {
  Begin(Disaggregation::kPlanned);
  HandOver("first", 200, 2 << 20, absl::ZeroDuration());  // so a slab takes two seconds
  Rates(2000, 500);
  EXPECT_FALSE(HandsOver("short", 200)) << "0.4 s against 2 s";
  EXPECT_TRUE(HandsOver("long", 2000)) << "4 s against 1 s and 2 s";
}

// Small steps tell a decode worker's pace of answers, not of prompts: that of prefill workers stands in.
TEST_F(RouterDisaggregationTest, PromptsOfDecodeWorkersAreEstimatedByPrefillWorkers) {
  Begin(Disaggregation::kPlanned);
  HandOver("first", 200, 2 << 20, absl::ZeroDuration());
  Rates(0, 0, /*prefill_mixed=*/1000);
  EXPECT_FALSE(HandsOver("short", 200)) << "0.2 s against 0.2 s and 2 s";
}

// All answers that stream there wait while a prompt is computed among them.
TEST_F(RouterDisaggregationTest, WhereAnswersStreamAPromptCostsThemToo) {
  Begin(Disaggregation::kPlanned);
  Rates(1000, 1500);
  EXPECT_TRUE(HandsOver("unknown", 1500)) << "nobody knows how long a state takes";
  HandOver("first", 200, 1e12, absl::ZeroDuration());
  EXPECT_FALSE(HandsOver("nobody there", 1500)) << "1 s against 1.5 s";
  ASSERT_TRUE(Submit("streams", 10).ok());
  Drain();
  EXPECT_TRUE(HandsOver("another", 1500)) << "1 s for it and for those there against 1.5 s";
}

// Of answers that take long a wait is a small share, and of several the sum of these.
TEST_F(RouterDisaggregationTest, LongAnswersWaitRatherThanAFirstToken) {
  Begin(Disaggregation::kPlanned);
  Rates(1000, 1500);
  HandOver("first", 200, 1e12, absl::ZeroDuration());
  ASSERT_TRUE(Submit("long answer", 10).ok());
  Drain();
  Tokens(kDecode, "long answer", {5}, 0);
  now += absl::Seconds(20);
  Tokens(kDecode, "long answer", {5}, 1, mesh::SequenceOutput::STOP_TOKEN);
  Drain();
  Rates(1000, 1500, 0, /*running=*/1);
  EXPECT_FALSE(HandsOver("one waits", 1500)) << "1 s, and a twentieth, against 1.5 s";
  Rates(1000, 1500, 0, /*running=*/30);
  EXPECT_TRUE(HandsOver("many wait", 1500)) << "1 s, and at most as much again, against 1.5 s";
}

// It is the usual first token that the wait is a share of, not this request's.
TEST_F(RouterDisaggregationTest, AWaitCountsByTheUsualFirstToken) {
  Begin(Disaggregation::kPlanned);
  Rates(1000, 1500);
  HandOver("first", 200, 1e12, absl::Seconds(2));
  ASSERT_TRUE(Submit("long answer", 10).ok());
  Drain();
  now += absl::Seconds(2);
  Tokens(kDecode, "long answer", {5}, 0);
  now += absl::Seconds(20);
  Tokens(kDecode, "long answer", {5}, 1, mesh::SequenceOutput::STOP_TOKEN);
  Drain();
  // Answers take 12 s, first tokens 2; beyond computing 1.99 s pass alone and 1.8 s when handed over.
  Rates(1000, 1500, 0, /*running=*/1);
  EXPECT_FALSE(HandsOver("one waits", 1500)) << "1 s and 2 / 12 and 1.99 against 1.5 s and 1.8";
  Rates(1000, 1500, 0, /*running=*/3);
  EXPECT_TRUE(HandsOver("three wait", 1500)) << "1 s and 3 * 2 / 12 and 1.99 against 1.5 s and 1.8";
}

// So they do where prefill workers take the same processors, and handing over spares nobody.
TEST_F(RouterDisaggregationTest, WithSharedProcessorsAHandOffSparesNobody) {
  Begin(Disaggregation::kPlanned, /*block_bytes=*/0, /*shared_processors=*/true);
  HandOver("first", 200, 1e12, absl::ZeroDuration());
  ASSERT_TRUE(Submit("streams", 10).ok());
  Drain();
  Rates(1000, 1010);
  EXPECT_FALSE(HandsOver("alike", 1500));
  Rates(1000, 500);
  EXPECT_TRUE(HandsOver("slower there", 1500));
}

// Latents leave while the prompt computes: only what is longer under way than that counts.
TEST_F(RouterDisaggregationTest, LatentsThatLeaveMeanwhileCostNothing) {
  Begin(Disaggregation::kPlanned, /*block_bytes=*/1 << 20);
  HandOver("first", 200, 64 << 20, absl::ZeroDuration());
  // 23 blocks take 0.36 s, the slab 0.06 s.
  Rates(1472 / 1.0, 1500 / 1.2);
  EXPECT_TRUE(HandsOver("slow to compute", 1500)) << "1.2 s against 1 s and 0.06 s";
  Rates(1472 / 0.1, 1500 / 0.3);
  EXPECT_FALSE(HandsOver("quick to compute", 1500)) << "0.3 s against 0.1 s and 0.26 s and 0.06 s";
}

// Until a rate is measured nobody knows how long a prompt computes, and nothing leaves meanwhile: who lacks
// less of it is nearer.
TEST_F(RouterDisaggregationTest, TokensHideNoSecondsOfMoving) {
  Begin(Disaggregation::kAlways, /*block_bytes=*/1 << 20);
  HandOver("first", 200, 64 << 20, absl::ZeroDuration());
  ASSERT_TRUE(Submit("second", 1500).ok());
  const Decision& d = *core->decisions().Last(1).at(0);
  ASSERT_EQ(d.candidate_count, 1u);
  EXPECT_FALSE(d.candidates[0].cost.measured);
  EXPECT_DOUBLE_EQ(d.candidates[0].cost.move, (4.0 + 23) / 64) << "the slab and 23 blocks";
}

// Rates say nothing of what steps and messages take. First tokens do.
TEST_F(RouterDisaggregationTest, WhatRatesDoNotTellIsLearnedFromFirstTokens) {
  Begin(Disaggregation::kPlanned);
  Rates(2000, 500);
  HandOver("first", 200, 1e12, absl::Seconds(1));  // 0.1 s were expected
  Alone("other", 50, absl::Milliseconds(100));     // as expected
  EXPECT_FALSE(HandsOver("short", 200)) << "0.4 s against 0.1 s and 0.9 s";
  EXPECT_TRUE(HandsOver("long", 1500)) << "3 s against 0.7 s and 0.9 s";
  HandOver("quicker", 1500, 1e12, absl::Milliseconds(200));
  EXPECT_TRUE(HandsOver("short again", 200)) << "0.4 s against 0.1 s";
}

// Nobody knows what the way that was not gone yet takes beside computing: no less than the other.
TEST_F(RouterDisaggregationTest, AWayThatWasNotGoneIsNoQuicker) {
  Begin(Disaggregation::kPlanned);
  Rates(2000, 500);
  HandOver("first", 200, 1e12, absl::Seconds(1));
  EXPECT_TRUE(HandsOver("short", 200)) << "0.4 s and 0.9 s against 0.1 s and 0.9 s";
}

// A way that was slow once is tried again.
TEST_F(RouterDisaggregationTest, WhatWasSlowOnceIsNotShunnedForever) {
  Begin(Disaggregation::kPlanned);
  Rates(2000, 500);
  HandOver("first", 200, 1e12, absl::Seconds(30));
  Alone("other", 50, absl::Milliseconds(100));
  EXPECT_FALSE(HandsOver("long", 1500)) << "3 s against 30 s";
  int tries = 0;
  while (tries < 200 && !HandsOver("long " + std::to_string(tries), 1500)) ++tries;
  EXPECT_LT(tries, 100);
}

TEST(UsualOverheadTest, IsTheMedianOfTheLastOnes) {
  UsualOverhead overhead;
  const UsualOverhead unknown;
  EXPECT_EQ(overhead.Or(unknown), 0);
  overhead.Seen(9);
  EXPECT_EQ(overhead.Or(unknown), 9);
  EXPECT_EQ(unknown.Or(overhead), 9) << "what was not tried is no quicker";
  overhead.Seen(-1);
  EXPECT_EQ(overhead.Or(unknown), 0) << "the lower of two, and never a gain";
  for (const double seconds : {2.0, 4.0, 3.0}) overhead.Seen(seconds);
  EXPECT_EQ(overhead.Or(unknown), 3) << "of -1, 2, 3, 4 and 9";
  for (int i = 0; i < 32; ++i) overhead.Seen(i < 16 ? 5 : 7);
  EXPECT_EQ(overhead.Or(unknown), 5) << "what came before 32 others is forgotten";
}

// A link that was slow for a while, and is taken seldom since.
TEST(UsualOverheadTest, OneSampleAfterALongTimeIsBelieved) {
  UsualOverhead overhead;
  const UsualOverhead unknown;
  for (int i = 0; i < 32; ++i) overhead.Seen(0.1);
  for (int i = 0; i < 17; ++i) overhead.Seen(2);
  EXPECT_EQ(overhead.Or(unknown), 2);
  int fades = 0;
  while (overhead.Or(unknown) > 0.2) {
    overhead.Fade();
    ++fades;
  }
  EXPECT_LT(fades, 1300);
  overhead.Seen(0.1);
  EXPECT_EQ(overhead.Or(unknown), 0.1);
  for (int i = 0; i < 100; ++i) overhead.Fade();
  overhead.Seen(2);
  EXPECT_EQ(overhead.Or(unknown), 0.1) << "after a short one it is one of many";
}

// One hand-off in between must not make that way look free, however rare hand-offs are.
TEST(UsualOverheadTest, FadesSlowlyWhenMuchIsKnownAndASampleEndsIt) {
  UsualOverhead known, new_one;
  const UsualOverhead unknown;
  for (int i = 0; i < 32; ++i) known.Seen(1);
  new_one.Seen(1);
  for (int i = 0; i < 64; ++i) {
    known.Fade();
    new_one.Fade();
  }
  EXPECT_GT(known.Or(unknown), 0.85);
  EXPECT_LT(new_one.Or(unknown), 0.05);
  known.Seen(1);
  EXPECT_EQ(known.Or(unknown), 1);
}

}  // namespace
}  // namespace deltamesh
