// Who is placed when the mesh is full, and what those hear who are not taken in.
#include <map>

#include "runtime/base/random.h"
#include "services/common/retry_hint.h"
#include "tests/unit/services/router_harness.h"

namespace deltamesh {
namespace {

constexpr LinkId kDecode = 1, kPrefill = 2, kDecode2 = 3;

class FairnessTest : public RouterCoreTest {
 protected:
  // One decode worker of `slabs`; it has measured `rate` prompt tokens a second.
  void Start(RouterOptions options, uint64_t slabs, double rate = 0) {
    Restart(std::move(options));
    mesh::WorkerMessage m = TestRegister("d1", mesh::ROLE_DECODE);
    m.mutable_register_()->mutable_capacity()->set_slabs(slabs);
    m.mutable_register_()->mutable_capacity()->set_latent_blocks(1024);
    Open(kDecode, m);
    Drain();
    Load(slabs, rate);
  }
  void Load(uint64_t slabs, double rate) {
    mesh::WorkerMessage m;
    m.mutable_heartbeat()->set_slabs_free(slabs);
    m.mutable_heartbeat()->set_latent_blocks_free(1024);
    m.mutable_heartbeat()->set_prompt_tokens_per_second(rate);
    Send(kDecode, m);
  }
  // A decode worker of 4 slabs and a prefill worker.
  void StartPools(uint64_t prefill_blocks, uint64_t prefill_slabs = 1) {
    Restart(DefaultOptions());
    Join(kDecode, "d1", mesh::ROLE_DECODE);
    mesh::WorkerMessage m = TestRegister("p1", mesh::ROLE_PREFILL);
    m.mutable_register_()->mutable_capacity()->set_slabs(prefill_slabs);
    m.mutable_register_()->mutable_capacity()->set_latent_blocks(prefill_blocks);
    Open(kPrefill, m);
    Drain();
  }
  // Their leases are kept and nothing ends: what the router placed there counts as taken.
  void PassBusy(absl::Duration duration) { Pass(duration, {kDecode, kPrefill}); }
  // Contexts of 2048 and 4096, with one place in the larger.
  void StartUneven() {
    Restart(DefaultOptions());
    Join(kDecode, "d1", mesh::ROLE_DECODE);
    mesh::WorkerMessage large = TestRegister("d2", mesh::ROLE_DECODE);
    large.mutable_register_()->mutable_capacity()->set_context_tokens(4096);
    large.mutable_register_()->mutable_capacity()->set_slabs(1);
    Open(kDecode2, large);
    Drain();
  }
  absl::Status Ask(const std::string& id, const std::string& tenant, int64_t prompt,
                   int64_t max_tokens = 8) {
    ClientRequest r = Make(id, prompt, max_tokens);
    r.cache.set_salt(tenant);
    return core->Submit(std::move(r), now);
  }
  // Ids placed since the last call, in order.
  std::vector<std::string> Placed() {
    std::vector<std::string> out;
    for (const RouterAction& action : core->TakeActions()) {
      const auto* sent = std::get_if<SendToWorker>(&action);
      if (sent == nullptr || !sent->message.has_start_decode()) continue;
      out.push_back(sent->message.start_decode().request_id());
      attempts[out.back()] = sent->message.start_decode().attempt();
    }
    return out;
  }
};

// A tenant that always has 50 requests waiting, and one that asks for one after the other, at a mesh that
// serves one at a time. What each was given never differs by more than a turn and two of the costliest.
TEST_F(FairnessTest, AFloodTakesNobodysShare) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SeededEntropy entropy(seed);
    RouterOptions options = DefaultOptions();
    options.turn_tokens = 500 + static_cast<int64_t>(entropy.Next() % 1500);
    constexpr int64_t kPromptMax = 1000, kAnswer = 8;
    Start(options, 1);
    std::map<std::string, std::pair<std::string, int64_t>> asked;  // tenant and cost
    int64_t next = 0;
    const auto ask = [&](const std::string& tenant) {
      const std::string id = tenant + std::to_string(next++);
      const int64_t prompt = 1 + static_cast<int64_t>(entropy.Next() % kPromptMax);
      ASSERT_TRUE(Ask(id, tenant, prompt, kAnswer).ok());
      asked[id] = {tenant, prompt + kAnswer};
    };
    ask("flood");  // runs, and counts for nobody
    std::vector<std::string> running = Placed();
    for (int i = 0; i < 50; ++i) ask("flood");
    for (int i = 0; i < 2; ++i) ask("modest");
    std::map<std::string, int64_t> given;
    for (int step = 0; step < 600; ++step) {
      now += absl::Milliseconds(10);
      ASSERT_EQ(running.size(), 1u);
      Tokens(kDecode, running[0], {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
      running = Placed();
      ASSERT_EQ(running.size(), 1u);
      const auto& [tenant, cost] = asked.at(running[0]);
      given[tenant] += cost;
      ASSERT_LE(std::abs(given["flood"] - given["modest"]),
                options.turn_tokens + 2 * (kPromptMax + kAnswer))
          << "seed " << seed << " step " << step;
      ask(tenant);
    }
  }
}

// Blocks are free in crumbs: small requests of another tenant would pass the large one for ever.
TEST_F(FairnessTest, ALargeRequestIsPassedForABoundedTime) {
  RouterOptions options = DefaultOptions();
  options.ageing_max = absl::Seconds(2);
  Restart(options);
  Join(kDecode, "d1", mesh::ROLE_DECODE);  // 64 blocks, 4 slabs
  int next = 0;
  std::vector<std::string> running;
  const auto ask_small = [&] {
    ASSERT_TRUE(Ask("s" + std::to_string(next++), "small", 900, 60).ok());
  };
  for (int i = 0; i < 6; ++i) ask_small();  // 15 blocks each: four fit
  running = Placed();
  ASSERT_EQ(running.size(), 4u);
  ASSERT_TRUE(Ask("large", "large", 1900, 100).ok());  // 32 blocks
  const absl::Time since = now;
  bool placed = false;
  int passed = 0;
  while (!placed && now - since < absl::Seconds(20)) {
    now += absl::Milliseconds(250);  // one ends, the next one comes
    const std::string ended = running.front();
    running.erase(running.begin());
    Tokens(kDecode, ended, {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
    ask_small();
    core->Tick(now);
    for (const std::string& id : Placed()) {
      placed |= id == "large";
      passed += id != "large";
      running.push_back(id);
    }
  }
  EXPECT_TRUE(placed);
  EXPECT_GT(passed, 4);  // crumbs were not left lying about
  // From ageing_max on nothing starts any more, and all that ran ends within four turns.
  EXPECT_LE(now - since, options.ageing_max + 4 * absl::Milliseconds(250));
}

// Who waits for a prefill worker has no use for what decode workers have: others may have that, however long
// it waits.
TEST_F(FairnessTest, WhoLacksAPrefillWorkerHoldsBackOnlyItsUsers) {
  StartPools(/*prefill_blocks=*/64);
  ASSERT_TRUE(Ask("a", "greedy", 1000).ok());
  ASSERT_TRUE(Ask("b", "greedy", 1000).ok());
  EXPECT_THAT(Placed(), ::testing::ElementsAre("a"));
  Grant(kDecode, "a", 960, attempts["a"]);
  PassBusy(absl::Seconds(6));
  ASSERT_TRUE(Ask("v", "other", 10).ok());
  EXPECT_THAT(Placed(), ::testing::ElementsAre("v"));
  // A younger one that would use the prefill worker does not get it first.
  ASSERT_TRUE(Ask("c", "third", 900).ok());
  ASSERT_TRUE(Ask("w", "other", 10).ok());
  EXPECT_THAT(Placed(), ::testing::ElementsAre("w"));
  Verdict(kDecode, "a", attempts["a"], absl::StatusCode::kOk);
  Prefilled(kPrefill, "a", attempts["a"]);
  core->Tick(now);
  EXPECT_THAT(Placed(), ::testing::ElementsAre("b"));
}

// Where prefill workers are held for another, what fits a step goes to a decode worker, as where they are
// full.
TEST_F(FairnessTest, WhatFitsAStepNeedsNoPrefillWorkerThatIsHeld) {
  StartPools(/*prefill_blocks=*/64);
  ASSERT_TRUE(Ask("a", "greedy", 1000).ok());
  EXPECT_THAT(Placed(), ::testing::ElementsAre("a"));
  Grant(kDecode, "a", 960, attempts["a"]);
  mesh::WorkerMessage m;
  m.mutable_handoff_result()->set_request_id("a");
  m.mutable_handoff_result()->set_attempt(attempts["a"]);
  m.mutable_handoff_result()->set_bytes(4 << 20);
  m.mutable_handoff_result()->set_seconds(0.01);
  Send(kDecode, m);  // so it is known what moving a state takes
  mesh::WorkerMessage beat;
  beat.mutable_heartbeat()->set_slabs_free(4);
  beat.mutable_heartbeat()->set_latent_blocks_free(64);
  beat.mutable_heartbeat()->set_prompt_tokens_per_second(1000);
  Send(kDecode, beat);  // and computing a prompt
  ASSERT_TRUE(Ask("b", "greedy", 1000).ok());
  PassBusy(absl::Seconds(6));
  Send(kDecode, beat);
  ASSERT_TRUE(Ask("longer", "third", 300).ok());
  ASSERT_TRUE(Ask("step", "other", 256).ok());
  EXPECT_THAT(Placed(), ::testing::ElementsAre("step"));
}

TEST_F(FairnessTest, WhoLacksADecodeWorkerTooHoldsBackAll) {
  StartPools(/*prefill_blocks=*/64);
  ASSERT_TRUE(Ask("a", "greedy", 2000).ok());  // 32 of 64 blocks
  ASSERT_TRUE(Ask("f", "greedy", 10).ok());
  ASSERT_TRUE(Ask("b", "greedy", 2000).ok());
  EXPECT_THAT(Placed(), ::testing::ElementsAre("a", "f"));
  Grant(kDecode, "a", 1984, attempts["a"]);
  PassBusy(absl::Seconds(6));
  ASSERT_TRUE(Ask("v", "other", 10).ok());
  EXPECT_THAT(Placed(), ::testing::IsEmpty());
}

// One that was tried without prefill workers is tried with them as soon as nobody holds them.
TEST_F(FairnessTest, PrefillWorkersAreFreeOnceWhoHeldThemHasLeft) {
  StartPools(/*prefill_blocks=*/20, /*prefill_slabs=*/4);
  ASSERT_TRUE(Ask("a", "greedy", 1000).ok());  // 15 blocks without its last
  ASSERT_TRUE(Ask("b", "greedy", 1000).ok());
  EXPECT_THAT(Placed(), ::testing::ElementsAre("a"));
  Grant(kDecode, "a", 960, attempts["a"]);
  PassBusy(absl::Seconds(6));
  ASSERT_TRUE(Ask("c", "other", 300).ok());  // 4 blocks
  EXPECT_THAT(Placed(), ::testing::IsEmpty());
  core->CancelClient("b", now);
  core->Tick(now);
  EXPECT_THAT(Placed(), ::testing::ElementsAre("c"));
}

// What only a worker that drains could hold would wait for a place that never comes, and hold back others.
TEST_F(FairnessTest, NobodyWaitsForAWorkerThatDrains) {
  StartUneven();
  ASSERT_TRUE(Ask("runs", "a", 3000).ok());
  ASSERT_TRUE(Ask("waits", "a", 3000).ok());
  EXPECT_THAT(Placed(), ::testing::ElementsAre("runs"));
  Beat(kDecode2, 0, 0, 0, /*draining=*/true);
  EXPECT_EQ(
      Drain(),
      "client waits failed UNAVAILABLE: the only decode workers that can hold 3008 tokens are "
      "draining; retry when another is up\n");
  EXPECT_EQ(
      Ask("late", "a", 3000).ToString(),
      "UNAVAILABLE: prompt: 3000 tokens leave no room for an answer in a context of 2048, and "
      "whoever has more is draining; retry when another is up, or shorten it");
  EXPECT_EQ(Ask("longest", "a", 4096).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(core->context_tokens(), 4096);  // of the mesh, soon again
  // An answer is cut to what the others hold.
  ASSERT_TRUE(Ask("cut", "a", 10, 3000).ok());
  EXPECT_EQ(Drain(), "1 <- StartDecode cut prompt=10 handoff=0 max=2038 attempt=17\n");
}

// Who named no length was given what the largest worker holds; it takes less when that one drains.
TEST_F(FairnessTest, AnOpenEndedAnswerIsCutToWhatStillFits) {
  StartUneven();
  ASSERT_TRUE(Ask("runs", "a", 3000).ok());
  ASSERT_TRUE(Ask("open", "a", 10, 0).ok());
  ASSERT_TRUE(Ask("more", "a", 10, 100'000).ok());
  ASSERT_TRUE(Ask("named", "a", 10, 3000).ok());  // fits, so less is no answer to it
  EXPECT_THAT(Placed(), ::testing::ElementsAre("runs"));
  Beat(kDecode2, 0, 0, 0, /*draining=*/true);
  EXPECT_EQ(Drain(),
            "1 <- StartDecode open prompt=10 handoff=0 max=2038 attempt=17\n"
            "1 <- StartDecode more prompt=10 handoff=0 max=2038 attempt=33\n"
            "client named failed UNAVAILABLE: the only decode workers that can hold 3010 tokens "
            "are draining; retry when another is up\n");
}

TEST_F(FairnessTest, CheapRequestsOfATenantPassCostlyOnesForABoundedTime) {
  RouterOptions options = DefaultOptions();
  options.ageing_max = absl::Seconds(1);
  Start(options, 1, /*rate=*/1000);  // 1900 tokens: 1.9 s, cut to 1 s
  ASSERT_TRUE(Ask("runs", "", 10).ok());
  ASSERT_TRUE(Ask("costly", "", 1900).ok());
  now += absl::Milliseconds(500);
  ASSERT_TRUE(Ask("cheap", "", 10).ok());
  now += absl::Milliseconds(600);
  ASSERT_TRUE(Ask("late", "", 10).ok());
  std::vector<std::string> order = Placed();
  while (order.size() < 4) {
    Tokens(kDecode, order.back(), {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
    for (const std::string& id : Placed()) order.push_back(id);
  }
  EXPECT_THAT(order, ::testing::ElementsAre("runs", "cheap", "costly", "late"));
}

TEST_F(FairnessTest, WhoIsRefusedHearsWhenToComeAgain) {
  RouterOptions options = DefaultOptions();
  options.waiting_requests_max = 3;
  options.live_requests_max = 100;
  Start(options, 1, /*rate=*/100);
  ASSERT_TRUE(Ask("runs", "a", 10).ok());
  for (const char* id : {"1", "2", "3"}) ASSERT_TRUE(Ask(id, "a", 492).ok());  // 500 tokens each
  const absl::Status full = Ask("4", "a", 492);
  EXPECT_EQ(
      full.ToString().substr(0, 85),
      "RESOURCE_EXHAUSTED: 3 requests wait for a worker, the router's bound for a tenant; re");
  EXPECT_EQ(RetryAfterOf(full), absl::Seconds(20));  // 2000 tokens at 100 a second
  // Another tenant is taken in: the flood is not its own.
  EXPECT_TRUE(Ask("other", "b", 10).ok());
  EXPECT_EQ(core->gauges().waiting_tokens, 1518);
  EXPECT_EQ(core->gauges().waiting_tenants, 2);
  EXPECT_DOUBLE_EQ(core->gauges().drain_seconds, 15.18);
  EXPECT_EQ(core->RetryAfter(), absl::Seconds(15.18));
}

TEST_F(FairnessTest, WhatWouldWaitTooLongIsRefusedAtOnce) {
  RouterOptions options = DefaultOptions();
  options.waiting_max = absl::Seconds(8);
  Start(options, 1, /*rate=*/100);
  ASSERT_TRUE(Ask("runs", "", 10).ok());
  ASSERT_TRUE(Ask("1", "", 392).ok());  // alone it may wait
  const absl::Status full = Ask("2", "", 492);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()),
              ::testing::HasSubstr("it would take 9s, longer than 8s"));
  EXPECT_EQ(RetryAfterOf(full), absl::Seconds(8));
}

TEST_F(FairnessTest, TheCostOfWhatWaitsIsBounded) {
  RouterOptions options = DefaultOptions();
  options.waiting_tokens_max = 1000;
  Start(options, 1);
  ASSERT_TRUE(Ask("runs", "", 10).ok());
  ASSERT_TRUE(Ask("1", "", 1200).ok());  // one may always wait
  const absl::Status full = Ask("2", "", 10);
  EXPECT_THAT(std::string(full.message()), ::testing::HasSubstr("requests of 1208 tokens wait"));
  EXPECT_EQ(RetryAfterOf(full), absl::Seconds(1));  // no pace is known
}

// A request that waits is looked up when something changed, not whenever somebody speaks.
TEST_F(FairnessTest, WaitingCostsNoLookups) {
  Start(DefaultOptions(), 1);
  mesh::WorkerMessage told;
  told.mutable_prefixes()->set_complete(true);
  Send(kDecode, told);
  ASSERT_TRUE(Ask("runs", "", 200).ok());
  ASSERT_TRUE(Ask("waits", "", 200).ok());
  const uint64_t before = core->counters().prefix_lookups;
  for (int i = 0; i < 1000; ++i) {
    now += absl::Milliseconds(1);
    Load(0, 0);
    core->Tick(now);
  }
  EXPECT_EQ(core->counters().prefix_lookups, before);
  for (int i = 1; i <= 1000; ++i) {  // the index changes all the time
    now += absl::Milliseconds(1);
    told.mutable_prefixes()->set_sequence(static_cast<uint64_t>(i));
    Send(kDecode, told);
    core->Tick(now);
  }
  EXPECT_LE(core->counters().prefix_lookups, before + 10);
  EXPECT_GE(core->counters().prefix_lookups, before + 9);
}

}  // namespace
}  // namespace deltamesh
