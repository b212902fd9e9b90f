// What the core remembers of its decisions.
#include "runtime/prefix/prefix_hash.h"
#include "services/router/decision_log.h"
#include "tests/unit/services/router_harness.h"

namespace deltamesh {
namespace {

TEST(DecisionLogTest, RemembersTheLastAndFindsThemByEitherName) {
  DecisionLog log(3);
  EXPECT_TRUE(log.Last(5).empty());
  EXPECT_EQ(log.At(0), nullptr);
  std::vector<DecisionLog::Ticket> tickets;
  for (const char* id : {"a/1", "b/2", "a/3", "ab/4"}) {
    tickets.push_back(log.Begin(id, absl::UnixEpoch()));
    log.At(tickets.back())->message = id;
  }
  EXPECT_EQ(log.At(tickets[0]), nullptr) << "its slot went to another";
  EXPECT_EQ(log.At(tickets[1])->request_id, "b/2");
  ASSERT_EQ(log.Last(2).size(), 2u);
  EXPECT_EQ(log.Last(2)[0]->request_id, "ab/4");
  ASSERT_EQ(log.Find("a", 9).size(), 1u) << "not ab";
  EXPECT_EQ(log.Find("a", 9)[0]->request_id, "a/3");
  EXPECT_EQ(log.Find("b/2", 9).size(), 1u);
  EXPECT_TRUE(log.Find("a/1", 9).empty());
  EXPECT_EQ(log.At(log.Begin("new", absl::UnixEpoch()))->message, "") << "nothing of the old one";
}

TEST(DecisionLogTest, KeepsTheCheapestCandidates) {
  Decision d;
  for (int i = 0; i < 40; ++i) {
    DecisionCandidate c;
    c.decode = std::to_string(i * 7 % 40);
    c.cost.queue = i * 7 % 40;
    c.room = i * 7 % 40 != 3;
    d.Add(c);
  }
  EXPECT_EQ(d.candidate_count, Decision::kCandidatesMax);
  EXPECT_EQ(d.candidates_left_out, 40 - static_cast<int64_t>(Decision::kCandidatesMax));
  for (size_t i = 0; i < d.candidate_count; ++i) {
    EXPECT_EQ(d.candidates[i].decode, std::to_string(i + (i >= 3))) << "without room comes last";
  }
}

constexpr LinkId kPrefill = 1, kDecode = 2, kDecode2 = 3;

class ExplainTest : public RouterCoreTest {
 protected:
  ExplainTest() {
    Join(kPrefill, "p1", mesh::ROLE_PREFILL);
    Join(kDecode, "d1", mesh::ROLE_DECODE);
  }
  const Decision& Last() { return *core->decisions().Last(1).at(0); }
  void Rate(LinkId link, double rate, uint64_t waiting_tokens) {
    mesh::WorkerMessage m;
    m.mutable_heartbeat()->set_slabs_free(4);
    m.mutable_heartbeat()->set_latent_blocks_free(64);
    m.mutable_heartbeat()->set_waiting_tokens(waiting_tokens);
    m.mutable_heartbeat()->set_prompt_tokens_per_second(rate);
    Send(link, m);
  }
};

TEST_F(ExplainTest, APlacementAndWhatBecameOfIt) {
  Join(kDecode2, "d2", mesh::ROLE_DECODE);
  Rate(kPrefill, 100, 50);
  Rate(kDecode, 10, 30);
  Rate(kDecode2, 10, 20);
  now += absl::Seconds(1);
  ASSERT_TRUE(Submit("a/1", 200, 3).ok());
  EXPECT_LT(Last().seconds, 0) << "it runs";
  EXPECT_LT(Last().ttft_seconds, 0);
  Drain();
  now += absl::Seconds(2);
  Grant(kDecode2, "a/1", 192, attempts["a/1"]);
  Prefilled(kPrefill, "a/1", attempts["a/1"], 128);
  Verdict(kDecode2, "a/1", attempts["a/1"], absl::StatusCode::kDataLoss, "CHECKSUM");
  Grant(kDecode2, "a/1", 192, attempts["a/1"] + 1);
  Drain();
  Prefilled(kPrefill, "a/1", attempts["a/1"], 64);
  Verdict(kDecode2, "a/1", attempts["a/1"], absl::StatusCode::kOk);
  now += absl::Seconds(3);
  Tokens(kDecode2, "a/1", {5}, 0);
  now += absl::Seconds(4);
  Tokens(kDecode2, "a/1", {6}, 1, mesh::SequenceOutput::STOP_TOKEN);

  const Decision& d = Last();
  EXPECT_EQ(d.prompt_tokens, 200);
  EXPECT_EQ(d.cost_tokens, 203);
  EXPECT_EQ(d.placements, 1);
  EXPECT_EQ(d.reason, DecisionReason::kCheapest);
  ASSERT_EQ(d.candidate_count, 2u);  // with a prefill worker nobody computes all of it alone
  EXPECT_EQ(d.candidates_left_out, 0);
  EXPECT_EQ(d.chosen, 0u);
  const DecisionCandidate& first = d.candidates[0];
  EXPECT_EQ(first.prefill + ">" + first.decode, "p1>d2");
  EXPECT_DOUBLE_EQ(first.cost.queue, 0.5 + 2);
  EXPECT_DOUBLE_EQ(first.cost.compute, 192 / 100.0 + 8 / 10.0);
  EXPECT_EQ(first.compute_tokens, 200);
  EXPECT_EQ(d.candidates[1].decode, "d1");
  EXPECT_DOUBLE_EQ(d.candidates[1].cost.total() - first.cost.total(), 1);
  EXPECT_EQ(d.handoffs_refused, 1);
  EXPECT_EQ(d.handoff_bytes, 100);
  EXPECT_EQ(d.restored_tokens, 64);
  EXPECT_EQ(d.completion_tokens, 2);
  EXPECT_DOUBLE_EQ(d.ttft_seconds, 5);
  EXPECT_DOUBLE_EQ(d.seconds, 9);
  EXPECT_EQ(d.code, absl::StatusCode::kOk);
}

TEST_F(ExplainTest, TheTwoFactsOfWhatIsHeldAndTheChoiceToAppend) {
  mesh::WorkerMessage told;
  told.mutable_prefixes()->set_complete(true);
  Send(kDecode, told);
  ASSERT_TRUE(Submit("first", 300).ok());
  EXPECT_TRUE(Last().named);
  EXPECT_EQ(Last().latent_tokens, 0);
  // What its keys are, the worker knows as well.
  PrefixChain chain(PrefixModel("d1", 1), "");
  chain.Append(Make("", 300).prompt);
  for (size_t i = 0; i < 3; ++i) {
    told.mutable_prefixes()->add_keys(chain.keys()[i].index());
    told.mutable_prefixes()->mutable_changes()->push_back(mesh::PrefixChanges::LATENTS_ADDED);
  }
  told.mutable_prefixes()->add_keys(chain.keys()[1].index());
  told.mutable_prefixes()->mutable_changes()->push_back(mesh::PrefixChanges::SNAPSHOT_ADDED);
  told.mutable_prefixes()->set_sequence(1);
  Send(kDecode, told);
  Rate(kPrefill, 10, 1000);  // a long queue
  Rate(kDecode, 100, 0);
  ASSERT_TRUE(Submit("second", 300).ok());
  const Decision& d = Last();
  EXPECT_EQ(d.latent_tokens, 192);
  EXPECT_EQ(d.snapshot_tokens, 128);
  EXPECT_EQ(d.latents_at + d.snapshot_at, "d1d1");
  EXPECT_EQ(d.cost_tokens, 300 - 128 + 8);
  ASSERT_EQ(d.candidate_count, 2u);
  EXPECT_EQ(d.chosen, 0u);
  EXPECT_EQ(d.candidates[0].prefill, "");
  EXPECT_EQ(d.candidates[0].cached_tokens, 128);
  EXPECT_EQ(d.candidates[0].compute_tokens, 172);
}

// Of sixteen breakpoints of a prompt that is new, the two shallowest reach the workers; of one that is known,
// all that are known and two more.
TEST_F(ExplainTest, BreakpointsOfUniquePromptsAreBounded) {
  const auto passed = [&](const std::string& id) {
    ClientRequest r = Make(id, 700);
    for (uint64_t b = 10; b >= 1; --b) r.cache.add_breakpoints(64 * b);
    CHECK_OK(core->Submit(std::move(r), now));
    for (const RouterAction& action : core->TakeActions()) {
      const auto* sent = std::get_if<SendToWorker>(&action);
      if (sent == nullptr || !sent->message.has_start_decode()) continue;
      const auto& at = sent->message.start_decode().cache().breakpoints();
      return std::vector<uint64_t>(at.begin(), at.end());
    }
    return std::vector<uint64_t>();
  };
  mesh::WorkerMessage told;
  told.mutable_prefixes()->set_complete(true);
  Send(kDecode, told);
  EXPECT_THAT(passed("new"), ::testing::ElementsAre(64, 128));
  PrefixChain chain(PrefixModel("d1", 1), "");
  chain.Append(Make("", 700).prompt);
  for (size_t i = 0; i < 4; ++i) {
    told.mutable_prefixes()->add_keys(chain.keys()[i].index());
    told.mutable_prefixes()->mutable_changes()->push_back(mesh::PrefixChanges::LATENTS_ADDED);
  }
  told.mutable_prefixes()->set_sequence(1);
  Send(kDecode, told);
  EXPECT_THAT(passed("known"), ::testing::ElementsAre(64, 128, 192, 256, 320, 384));
}

TEST_F(ExplainTest, WhoNeverHadAPlaceIsExplainedToo) {
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Submit(std::to_string(i), 10).ok());
  EXPECT_EQ(Last().reason, DecisionReason::kNone);
  EXPECT_EQ(Last().placements, 0);
  EXPECT_TRUE(core->CancelClient("4", now));
  EXPECT_EQ(Last().reason, DecisionReason::kRefused);
  EXPECT_EQ(Last().code, absl::StatusCode::kCancelled);
  EXPECT_EQ(core->decisions().Find("0", 9).at(0)->reason, DecisionReason::kOnly);
}

}  // namespace
}  // namespace deltamesh
