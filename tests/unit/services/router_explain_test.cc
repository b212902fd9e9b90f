// What the core remembers of its decisions.
#include <functional>
#include <set>

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

TEST(DecisionLogTest, RefusalsAreFoundAmongTheRestAndPushOutNothing) {
  DecisionLog log(4);
  const TraceContext trace = {.trace_id = std::string(32, 'a'),
                              .parent_id = std::string(16, 'b'),
                              .span_id = std::string(16, 'c')};
  log.At(log.Begin("served/1", absl::UnixEpoch()))->trace = trace;
  log.Refuse({.request_id = "refused/2",
              .trace = trace,
              .prompt_tokens = 5,
              .status = absl::NotFoundError("session: none")},
             absl::UnixEpoch());
  log.Begin("served/3", absl::UnixEpoch());
  const auto last = log.Last(9);
  ASSERT_EQ(last.size(), 3u);
  EXPECT_EQ(last[0]->request_id, "served/3");
  const Decision& refused = *last[1];
  EXPECT_EQ(refused.request_id, "refused/2");
  EXPECT_EQ(refused.reason, DecisionReason::kTurnedAway);
  EXPECT_EQ(refused.code, absl::StatusCode::kNotFound);
  EXPECT_EQ(refused.message, "session: none");
  EXPECT_EQ(refused.prompt_tokens, 5);
  EXPECT_EQ(last[2]->request_id, "served/1");
  ASSERT_EQ(log.FindTrace(trace.trace_id, 9).size(), 2u);
  EXPECT_EQ(log.FindTrace(trace.trace_id, 1)[0]->request_id, "refused/2");
  EXPECT_EQ(log.Find("refused", 9).size(), 1u);
  for (int i = 0; i < 100; ++i) {
    log.Refuse({.request_id = "flood", .trace = {}, .status = absl::InternalError("x")},
               absl::UnixEpoch());
  }
  EXPECT_EQ(log.Find("served", 9).size(), 2u);
  EXPECT_EQ(log.Find("flood", 9).size(), 1u) << "a fourth of four";
}

TEST(DecisionLogTest, ASlotKeepsTheMemoryOfItsStrings) {
  DecisionLog log(2);
  const auto strings = [](Decision& d) {
    return std::vector<std::string*>{&d.request_id,    &d.trace.trace_id, &d.trace.parent_id,
                                     &d.trace.span_id, &d.latents_at,     &d.snapshot_at,
                                     &d.message,       &d.fetched_from,   &d.fetch_refusal};
  };
  Decision& first = *log.At(log.Begin("first", absl::UnixEpoch()));
  std::vector<const char*> memory;
  for (std::string* s : strings(first)) {
    s->assign(100, 'x');
    memory.push_back(s->data());
  }
  log.Begin("second", absl::UnixEpoch());
  Decision& third = *log.At(log.Begin("third", absl::UnixEpoch()));
  ASSERT_EQ(&first, &third);
  for (size_t i = 0; i < memory.size(); ++i) {
    const std::string& s = *strings(third)[i];
    EXPECT_EQ(s, i == 0 ? "third" : "");
    EXPECT_EQ(s.data(), memory[i]) << i;
  }
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
  Prefilled(kPrefill, "a/1", attempts["a/1"]);
  Verdict(kDecode2, "a/1", attempts["a/1"], absl::StatusCode::kDataLoss, "CHECKSUM");
  Grant(kDecode2, "a/1", 192, attempts["a/1"] + 1);
  Drain();
  Verdict(kDecode2, "a/1", attempts["a/1"], absl::StatusCode::kOk);
  now += absl::Seconds(3);
  Tokens(kDecode2, "a/1", {5}, 0, mesh::SequenceOutput::RUNNING, 64);
  now += absl::Seconds(4);
  Tokens(kDecode2, "a/1", {6}, 1, mesh::SequenceOutput::STOP_TOKEN, 64);

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

// A worker that has a lot to tell keeps nobody waiting, and is credited with nothing until it has told all.
TEST_F(ExplainTest, RequestsArePlacedWhileAWorkerTellsWhatItHas) {
  PrefixChain chain(PrefixModel("d1", 1), "");
  chain.Append(Make("", 300).prompt);
  mesh::WorkerMessage told;
  for (size_t i = 0; i < 3; ++i) {
    told.mutable_prefixes()->add_keys(chain.keys()[i].index());
    told.mutable_prefixes()->mutable_changes()->push_back(mesh::PrefixChanges::LATENTS_ADDED);
  }
  told.mutable_prefixes()->add_keys(chain.keys()[2].index());
  told.mutable_prefixes()->mutable_changes()->push_back(mesh::PrefixChanges::SNAPSHOT_ADDED);
  Send(kDecode, told);
  EXPECT_EQ(core->gauges().prefix_unknown, 1);
  EXPECT_TRUE(core->Ready().ok());
  ASSERT_TRUE(Submit("early", 300).ok());
  EXPECT_EQ(Last().placements, 1);
  EXPECT_EQ(Last().latent_tokens, 0);
  EXPECT_EQ(Last().snapshot_tokens, 0);
  told.mutable_prefixes()->Clear();
  told.mutable_prefixes()->set_sequence(1);
  told.mutable_prefixes()->set_complete(true);
  Send(kDecode, told);
  EXPECT_EQ(core->gauges().prefix_unknown, 0);
  ASSERT_TRUE(Submit("late", 300).ok());
  EXPECT_EQ(Last().snapshot_tokens, 192);
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

// A worker's bucket counts for that worker: what it would read there is neither computed nor paid for in the
// queue, and nobody fetches it from there.
TEST_F(ExplainTest, AStateInTheObjectStoreIsReadByWhoKnowsOfIt) {
  Join(4, "d2", mesh::ROLE_DECODE);
  PrefixChain chain(PrefixModel("d1", 1), "");
  chain.Append(Make("", 300).prompt);
  mesh::WorkerMessage told;
  told.mutable_prefixes()->set_complete(true);
  Send(4, told);
  told.mutable_prefixes()->add_keys(chain.keys()[2].index());
  told.mutable_prefixes()->mutable_changes()->push_back(mesh::PrefixChanges::OBJECT_ADDED);
  Send(kDecode, told);
  for (const LinkId link : {kDecode, LinkId{4}}) {
    mesh::WorkerMessage beat;
    beat.mutable_heartbeat()->set_slabs_free(4);
    beat.mutable_heartbeat()->set_latent_blocks_free(64);
    beat.mutable_heartbeat()->set_tokens_per_second(100);
    beat.mutable_heartbeat()->set_prompt_tokens_per_second(100);
    beat.mutable_heartbeat()->set_object_bytes_per_second(1e9);
    Send(link, beat);
  }
  Rate(kPrefill, 10, 1000);  // a long queue
  ASSERT_TRUE(Submit("a", 300).ok());
  const Decision& d = Last();
  EXPECT_EQ(d.latent_tokens, 0);
  EXPECT_EQ(d.snapshot_tokens, 0);
  EXPECT_EQ(d.object_tokens, 192);
  EXPECT_EQ(d.cost_tokens, 300 - 192 + 8);
  const DecisionCandidate& chosen = d.candidates[d.chosen];
  EXPECT_EQ(chosen.decode, "d1");
  EXPECT_EQ(chosen.prefill, "");
  EXPECT_EQ(chosen.read_from, ReadFrom::kObjects);
  EXPECT_EQ(chosen.cached_tokens, 192);
  EXPECT_EQ(chosen.fetch_from, "");
  // It is gone: the worker says so, and nobody is credited with it.
  told.mutable_prefixes()->set_sequence(1);
  told.mutable_prefixes()->set_changes(std::string(1, mesh::PrefixChanges::OBJECT_DROPPED));
  Send(kDecode, told);
  ASSERT_TRUE(Submit("b", 300).ok());
  EXPECT_EQ(Last().object_tokens, 0);
  EXPECT_EQ(Last().candidates[Last().chosen].cached_tokens, 0);
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

// Bandwidth may be known, in seconds, while no rate is.
TEST_F(ExplainTest, WhatWasNotMeasuredIsNotInSeconds) {
  Join(kDecode2, "d2", mesh::ROLE_DECODE);
  Beat(kDecode, 4, 64, 40);
  ASSERT_TRUE(Submit("first", 133).ok());
  const Decision& d = Last();
  EXPECT_FALSE(d.measured);
  ASSERT_EQ(d.candidate_count, 2u);
  EXPECT_EQ(d.candidates[0].decode, "d2");
  EXPECT_FALSE(d.candidates[0].cost.measured);
  EXPECT_DOUBLE_EQ(d.candidates[0].cost.total(), 133);
  EXPECT_DOUBLE_EQ(d.candidates[1].cost.total(), 40 + 133);
  // A prefill worker's rate of any kind measures all of them.
  mesh::WorkerMessage m;
  m.mutable_heartbeat()->set_slabs_free(4);
  m.mutable_heartbeat()->set_latent_blocks_free(64);
  m.mutable_heartbeat()->set_tokens_per_second(10);
  Send(kDecode2, m);
  ASSERT_TRUE(Submit("second", 133).ok());
  EXPECT_TRUE(Last().measured);
  for (size_t i = 0; i < Last().candidate_count; ++i) {
    EXPECT_TRUE(Last().candidates[i].cost.measured);
    EXPECT_LT(Last().candidates[i].cost.compute, 20) << "seconds of ten tokens each";
  }
}

TEST_F(ExplainTest, WhoeverExportsSpansHearsOfEachRequestOnce) {
  std::vector<std::string> heard;
  core->OnConcluded([&](const Decision& d) {
    heard.push_back(absl::StrFormat("%s %s %s %s", d.request_id, d.trace.trace_id, d.trace.span_id,
                                    absl::StatusCodeToString(d.code)));
  });
  ClientRequest r = Make("served", 10, 1);
  r.trace = {.trace_id = "t", .parent_id = "p", .span_id = "s"};
  ASSERT_TRUE(core->Submit(r, now).ok());
  Drain();
  EXPECT_TRUE(heard.empty());
  Tokens(kDecode, "served", {5}, 0, mesh::SequenceOutput::MAX_TOKENS);
  ASSERT_TRUE(Submit("left", 10).ok());
  EXPECT_TRUE(core->CancelClient("left", now));
  core->NoteRefusal({.request_id = "refused",
                     .trace = {.trace_id = "u", .parent_id = "p", .span_id = "v"},
                     .status = absl::ResourceExhaustedError("full")},
                    now);
  EXPECT_THAT(heard, ::testing::ElementsAre("served t s OK", "left   CANCELLED",
                                            "refused u v RESOURCE_EXHAUSTED"));
}

// Where all else is equal, what belongs together goes to the same worker: by the client's own word, else by
// how prompts begin.
TEST_F(ExplainTest, TiesFollowTheSessionElseThePrefixElseTheRequest) {
  for (LinkId link = kDecode2; link < kDecode2 + 3; ++link) {
    Join(link, absl::StrFormat("d%d", link), mesh::ROLE_DECODE);
  }
  int next = 0;
  const auto places = [&](const std::function<void(ClientRequest&)>& change) {
    std::set<std::string> seen;
    for (int i = 0; i < 12; ++i) {
      ClientRequest r = Make(absl::StrFormat("r%d", next++), 200);
      for (TokenId& t : r.prompt) t += 1000 * next;  // nothing of it is known
      change(r);
      const RequestId id = r.request_id;
      CHECK_OK(core->Submit(std::move(r), now));
      seen.insert(Last().candidates[Last().chosen].decode);
      core->CancelClient(id, now);
      for (LinkId link = kDecode; link < kDecode2 + 3; ++link) Beat(link);
      core->TakeActions();
    }
    return seen.size();
  };
  EXPECT_GT(places([](ClientRequest&) {}), 1u) << "ids spread";
  EXPECT_EQ(places([](ClientRequest& r) { r.cache.set_session(7); }), 1u);
  int key = 0;
  EXPECT_GT(places([&](ClientRequest& r) { r.cache.set_session(static_cast<uint64_t>(++key)); }),
            1u);
  mesh::WorkerMessage told;
  told.mutable_prefixes()->set_complete(true);
  Send(kDecode, told);
  const auto one_beginning = [](ClientRequest& r) {
    for (size_t i = 0; i < 100; ++i) r.prompt[i] = 3;
  };
  EXPECT_EQ(places(one_beginning), 1u) << "their first blocks are the same";
  EXPECT_GT(places([](ClientRequest&) {}), 1u);
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
