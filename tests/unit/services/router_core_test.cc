// The life of requests in the router's core, as transcripts.
#include <cmath>
#include <functional>
#include <limits>

#include "tests/unit/services/router_harness.h"

namespace deltamesh {
namespace {

constexpr LinkId kPrefill = 1, kDecode = 2, kPrefill2 = 3, kDecode2 = 4;

class RequestTest : public RouterCoreTest {
 protected:
  RequestTest() {
    Join(kPrefill, "p1", mesh::ROLE_PREFILL);
    Join(kDecode, "d1", mesh::ROLE_DECODE);
  }
};

TEST_F(RequestTest, WholeLifeThroughBothWorkers) {
  ASSERT_TRUE(Submit("a", 200, 3).ok());
  EXPECT_EQ(Drain(), "2 <- StartDecode a prompt=200 handoff=192 max=3 attempt=1\n");
  Grant(kDecode, "a", 192, 1);
  EXPECT_EQ(Drain(), "1 <- StartPrefill a tokens=192 transfer=7 attempt=1\n");
  Prefilled(kPrefill, "a", 1);
  Verdict(kDecode, "a", 1, absl::StatusCode::kOk);
  EXPECT_EQ(Drain(), "");
  Tokens(kDecode, "a", {5, 6}, 0, mesh::SequenceOutput::RUNNING, 128);
  Tokens(kDecode, "a", {7}, 2, mesh::SequenceOutput::MAX_TOKENS, 128);
  EXPECT_EQ(Drain(),
            "client a tokens [5 6] at 0\n"
            "client a tokens [7] at 2\n"
            "client a finished MAX_TOKENS usage 200+3 cached 128\n");
  EXPECT_EQ(core->gauges().live, 0);
  EXPECT_EQ(core->counters().handoffs_ok, 1u);
  EXPECT_EQ(core->counters().handoff_bytes, 100u);
  EXPECT_EQ(core->counters().stale_messages, 0u);
}

TEST_F(RequestTest, HandoffPositionIsTheLastBlockBoundaryBeforeTheLastToken) {
  const std::vector<std::pair<int64_t, int64_t>> cases = {
      {1, 0}, {63, 0}, {64, 0}, {65, 64}, {128, 64}, {129, 128}, {200, 192}};
  uint32_t attempt = 1;
  for (const auto& [prompt, handoff] : cases) {
    ASSERT_TRUE(Submit("a", prompt).ok());
    EXPECT_EQ(Drain(), absl::StrFormat("2 <- StartDecode a prompt=%d handoff=%d max=8 attempt=%d\n",
                                       prompt, handoff, attempt));
    attempt += kAttemptsPerPlacement;
    EXPECT_TRUE(core->CancelClient("a", now));
    Drain();
  }
}

TEST_F(RequestTest, WithoutPrefillWorkerTheDecodeWorkerComputesThePrompt) {
  core->OnLinkClosed(kPrefill, absl::UnavailableError("gone"), now);
  ASSERT_TRUE(Submit("a", 200).ok());
  EXPECT_EQ(Drain(), "2 <- StartDecode a prompt=200 handoff=0 max=8 attempt=1\n");
  Tokens(kDecode, "a", {5}, 0, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_EQ(Drain(),
            "client a tokens [5] at 0\nclient a finished STOP_TOKEN usage 200+1 cached 0\n");
}

TEST_F(RequestTest, RefusedHandoffIsTriedOnAnotherPrefillWorkerUnderANewGrant) {
  Join(kPrefill2, "p2", mesh::ROLE_PREFILL);
  ASSERT_TRUE(Submit("a", 100).ok());
  Drain();
  Grant(kDecode, "a", 64, 1);
  const std::string first = Drain();
  const LinkId used = first[0] == '1' ? kPrefill : kPrefill2;
  const LinkId other = used == kPrefill ? kPrefill2 : kPrefill;
  Verdict(kDecode, "a", 1, absl::StatusCode::kDataLoss, "CHECKSUM: region 3");
  EXPECT_EQ(Drain(), absl::StrFormat("%d <- Cancel a\n", used));
  Grant(kDecode, "a", 64, 2, 8);
  EXPECT_EQ(Drain(),
            absl::StrFormat("%d <- StartPrefill a tokens=64 transfer=8 attempt=2\n", other));
  ASSERT_EQ(core->counters().handoff_results.size(), 1u);
  EXPECT_EQ(core->counters().handoff_results[0], (std::pair<std::string, uint64_t>{"CHECKSUM", 1}));
  EXPECT_EQ(core->counters().handoffs_refused, 1u);
}

TEST_F(RequestTest, HandoffAttemptsAreBoundedAndTheReasonReachesTheClient) {
  ASSERT_TRUE(Submit("a", 100).ok());
  for (uint32_t attempt = 1; attempt <= 3; ++attempt) {
    Grant(kDecode, "a", 64, attempt);
    Drain();
    Verdict(kDecode, "a", attempt, absl::StatusCode::kDataLoss, "CHECKSUM: region 3");
  }
  EXPECT_EQ(Drain(),
            "2 <- Cancel a\n1 <- Cancel a\n"
            "client a failed DATA_LOSS: the prompt's state could not be handed over in 3 tries: "
            "CHECKSUM: region 3\n");
  EXPECT_EQ(core->gauges().live, 0);
}

TEST_F(RequestTest, PrefillWorkerLostBeforeItsTurnIsReplaced) {
  ASSERT_TRUE(Submit("a", 100).ok());
  core->OnLinkClosed(kPrefill, absl::UnavailableError("reset"), now);
  Join(kPrefill2, "p2", mesh::ROLE_PREFILL);
  Drain();
  Grant(kDecode, "a", 64, 1);
  EXPECT_EQ(Drain(), "3 <- StartPrefill a tokens=64 transfer=7 attempt=1\n");
}

TEST_F(RequestTest, PrefillWorkerLostWithNoOtherMakesTheDecodeWorkerComputeThePrompt) {
  ASSERT_TRUE(Submit("a", 100).ok());
  Grant(kDecode, "a", 64, 1);
  Drain();
  core->OnLinkClosed(kPrefill, absl::UnavailableError("reset"), now);
  EXPECT_EQ(Drain(), "2 <- Cancel a\n2 <- StartDecode a prompt=100 handoff=0 max=8 attempt=17\n");
  // What the old attempt still says is ignored.
  Verdict(kDecode, "a", 1, absl::StatusCode::kUnavailable, "PEER_LOST");
  Grant(kDecode, "a", 64, 1);
  Failed(kDecode, "a", 1, absl::InternalError("old"));
  EXPECT_EQ(Drain(), "");
  EXPECT_EQ(core->counters().stale_messages, 3u);
  Tokens(kDecode, "a", {9}, 0, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_EQ(Drain(),
            "client a tokens [9] at 0\nclient a finished STOP_TOKEN usage 100+1 cached 0\n");
}

TEST_F(RequestTest, PrefillGivingUpWaitsForTheDecodeWorkersVerdict) {
  ASSERT_TRUE(Submit("a", 100).ok());
  Grant(kDecode, "a", 64, 1);
  Drain();
  Failed(kPrefill, "a", 1, absl::DataLossError("refused"));
  EXPECT_EQ(Drain(), "");
  Verdict(kDecode, "a", 1, absl::StatusCode::kDataLoss, "WRONG_COUNT");
  EXPECT_EQ(Drain(), "1 <- Cancel a\n");
  Grant(kDecode, "a", 64, 2);
  EXPECT_EQ(Drain(), "1 <- StartPrefill a tokens=64 transfer=7 attempt=2\n");
  // No verdict this time: the router starts over by itself.
  Failed(kPrefill, "a", 2, absl::UnavailableError("cannot reach d1"));
  now += absl::Milliseconds(501);
  core->Tick(now);
  EXPECT_EQ(Drain(),
            "2 <- Cancel a\n1 <- Cancel a\n"
            "2 <- StartDecode a prompt=100 handoff=64 max=8 attempt=17\n");
}

TEST_F(RequestTest, FullPrefillWorkerSendsTheRequestBackToTheQueue) {
  ASSERT_TRUE(Submit("a", 100).ok());
  Grant(kDecode, "a", 64, 1);
  Drain();
  Failed(kPrefill, "a", 1, absl::ResourceExhaustedError("no slab"));
  EXPECT_EQ(Drain(), "2 <- Cancel a\n1 <- Cancel a\n");
  EXPECT_EQ(core->gauges().waiting, 1);
  Beat(kPrefill);
  EXPECT_EQ(Drain(), "2 <- StartDecode a prompt=100 handoff=64 max=8 attempt=17\n");
  EXPECT_EQ(core->counters().placement_refusals, 1u);
}

TEST_F(RequestTest, FullDecodeWorkerIsRetriedAfterEachHeartbeat) {
  ASSERT_TRUE(Submit("a", 10).ok());
  for (uint32_t i = 0; i < 50; ++i) {
    EXPECT_EQ(Drain(), absl::StrFormat("2 <- StartDecode a prompt=10 handoff=0 max=8 attempt=%d\n",
                                       1 + i * kAttemptsPerPlacement));
    Failed(kDecode, "a", attempts["a"], absl::ResourceExhaustedError("no slab"));
    EXPECT_EQ(Drain(), "2 <- Cancel a\n");
    core->Tick(now);
    EXPECT_EQ(Drain(), "") << "no heartbeat has shown room";
    Beat(kDecode);
  }
  Drain();
  Tokens(kDecode, "a", {5}, 0, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_EQ(core->counters().finished, 1u);
  EXPECT_EQ(core->counters().placement_refusals, 50u);
}

TEST_F(RequestTest, RefusalsForWantOfRoomDoNotStartTheWaitAnew) {
  ASSERT_TRUE(Submit("a", 10).ok());
  std::string last;
  for (int second = 0; second < 62; ++second) {
    Drain();
    Failed(kDecode, "a", attempts["a"], absl::ResourceExhaustedError("no slab"));
    now += absl::Seconds(1);
    core->Tick(now);
    Beat(kPrefill);
    Beat(kDecode);
    if (core->gauges().live == 0) break;
  }
  EXPECT_THAT(Drain(), ::testing::HasSubstr("client a failed RESOURCE_EXHAUSTED: waited 1m"));
  EXPECT_EQ(now, absl::FromUnixSeconds(1061));
}

TEST_F(RequestTest, TheWaitEndsAlsoWhenEveryTickFindsTheRequestWithAWorker) {
  ASSERT_TRUE(Submit("a", 10).ok());
  for (int second = 0; second <= 61 && core->gauges().live > 0; ++second) {
    Drain();
    core->Tick(now);
    Failed(kDecode, "a", attempts["a"], absl::ResourceExhaustedError("no slab"));
    now += absl::Seconds(1);
    Beat(kPrefill);
    Beat(kDecode);
  }
  EXPECT_THAT(Drain(), ::testing::HasSubstr("client a failed RESOURCE_EXHAUSTED: waited 1m"));
}

TEST_F(RequestTest, NothingOfACancelledRequestReachesTheNextOneOfItsId) {
  ASSERT_TRUE(Submit("a", 10).ok());
  Drain();
  const uint32_t old = attempts["a"];
  core->CancelClient("a", now);
  ASSERT_TRUE(Submit("a", 10).ok());
  Drain();
  ASSERT_NE(attempts["a"], old);
  TokensOf(old, kDecode, "a", {66}, 0);
  TokensOf(old, kDecode, "a", {67}, 1, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_EQ(Drain(), "");
  EXPECT_EQ(core->counters().stale_messages, 2u);
  Tokens(kDecode, "a", {5}, 0, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_EQ(Drain(),
            "client a tokens [5] at 0\nclient a finished STOP_TOKEN usage 10+1 cached 0\n");
}

TEST_F(RequestTest, NoGrantOrVerdictOfACancelledRequestReachesTheNextOneOfItsId) {
  ASSERT_TRUE(Submit("a", 100).ok());
  Grant(kDecode, "a", 64, 1);
  Verdict(kDecode, "a", 1, absl::StatusCode::kDataLoss, "CHECKSUM");
  core->CancelClient("a", now);
  ASSERT_TRUE(Submit("a", 100).ok());
  Drain();
  // In flight at the time: the grants after the refusal, each of the numbers the worker may use.
  for (uint32_t attempt = 1; attempt <= kAttemptsPerPlacement; ++attempt) {
    Grant(kDecode, "a", 64, attempt, 66);
    Failed(kDecode, "a", attempt, absl::InternalError("old"));
  }
  EXPECT_EQ(Drain(), "");
  Grant(kDecode, "a", 64, 1 + kAttemptsPerPlacement, 8);
  EXPECT_EQ(Drain(), "1 <- StartPrefill a tokens=64 transfer=8 attempt=17\n");
  Verdict(kDecode, "a", 1, absl::StatusCode::kOk);
  Prefilled(kPrefill, "a", 1);
  TokensOf(1, kDecode, "a", {66}, 0);
  EXPECT_EQ(Drain(), "");
  EXPECT_EQ(core->counters().stale_messages, 2 * kAttemptsPerPlacement + 3u);
}

TEST_F(RequestTest, RefusalThatIsNotRetriedEndsTheRequestWithItsOwnCode) {
  ASSERT_TRUE(Submit("a", 100).ok());
  Grant(kDecode, "a", 64, 1);
  Drain();
  const absl::Status cause = absl::FailedPreconditionError("WRONG_MODEL: digest differs");
  Verdict(kDecode, "a", 1, cause.code(), MessageOf(cause));
  Failed(kDecode, "a", 1, cause);
  EXPECT_EQ(Drain(),
            "1 <- Cancel a\n2 <- Cancel a\n"
            "client a failed FAILED_PRECONDITION: decode worker \"d1\": WRONG_MODEL: digest "
            "differs\n");
  EXPECT_EQ(core->gauges().live, 0);
}

TEST_F(RequestTest, LostDecodeWorkerFailsItsRequestsAndOnlyThose) {
  Join(kDecode2, "d2", mesh::ROLE_DECODE);
  std::map<std::string, LinkId> where;
  for (const std::string id : {"a", "b", "c", "d"}) {
    ASSERT_TRUE(Submit(id, 10).ok());
    where[id] = Drain()[0] == '2' ? kDecode : kDecode2;
  }
  ASSERT_EQ(
      std::count_if(where.begin(), where.end(), [](const auto& w) { return w.second == kDecode; }),
      2);
  core->OnLinkClosed(kDecode, absl::UnavailableError("reset"), now);
  std::string expected;
  for (const auto& [id, link] : where) {
    if (link == kDecode) {
      expected += absl::StrFormat(
          "client %s failed UNAVAILABLE: decode worker \"d1\" was lost: reset; "
          "send the request again\n",
          id);
    }
  }
  EXPECT_EQ(Drain(), expected);
  EXPECT_EQ(core->gauges().live, 2);
  EXPECT_EQ(core->counters().decode_lost, 1u);
}

TEST_F(RequestTest, SilentWorkerIsLostWithinItsLease) {
  ASSERT_TRUE(Submit("a", 10).ok());
  Drain();
  Pass(absl::Seconds(4), {kPrefill});
  EXPECT_EQ(
      Drain(),
      "2 closed UNAVAILABLE: worker \"d1\" was silent for 4s, its lease is 3s\n"
      "client a failed UNAVAILABLE: decode worker \"d1\" was lost: silent for longer than its "
      "lease of 3s; send the request again\n");
  EXPECT_EQ(core->counters().leases_expired, 1u);
  // The link's own end and its last words change nothing.
  Tokens(kDecode, "a", {1}, 0);
  core->OnLinkClosed(kDecode, absl::OkStatus(), now);
  EXPECT_EQ(Drain(), "");
  EXPECT_EQ(core->counters().stale_messages, 1u);
  EXPECT_EQ(Submit("b", 10).code(), absl::StatusCode::kUnavailable);
}

TEST_F(RequestTest, WaitsInOrderWhenFullAndMovesUpWhenOneEnds) {
  for (const std::string id : {"a", "b", "c", "d", "e", "f"}) ASSERT_TRUE(Submit(id, 10).ok());
  EXPECT_EQ(core->gauges().waiting, 2);
  Drain();
  Tokens(kDecode, "b", {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_EQ(Drain(),
            "client b tokens [1] at 0\nclient b finished STOP_TOKEN usage 10+1 cached 0\n"
            "2 <- StartDecode e prompt=10 handoff=0 max=8 attempt=65\n");
  EXPECT_TRUE(core->CancelClient("a", now));
  EXPECT_EQ(Drain(), "2 <- Cancel a\n2 <- StartDecode f prompt=10 handoff=0 max=8 attempt=81\n");
}

TEST_F(RequestTest, BlocksCountAsRoomToo) {
  // 64 blocks; each request takes 32.
  ASSERT_TRUE(Submit("a", 2000, 48).ok());
  ASSERT_TRUE(Submit("b", 2000, 48).ok());
  ASSERT_TRUE(Submit("c", 10, 1).ok());
  EXPECT_EQ(core->gauges().waiting, 1);
}

TEST_F(RequestTest, HeartbeatOfFreeRoomFromBeforeAPlacementDoesNotOverfill) {
  for (const std::string id : {"a", "b", "c", "d"}) ASSERT_TRUE(Submit(id, 10).ok());
  Drain();
  Beat(kDecode, 4);  // left the worker before any of them arrived
  ASSERT_TRUE(Submit("e", 10).ok());
  EXPECT_EQ(Drain(), "");
  EXPECT_EQ(core->gauges().waiting, 1);
}

TEST_F(RequestTest, QueueAndLiveBoundsRefuse) {
  RouterOptions o = DefaultOptions();
  o.waiting_requests_max = 2;
  o.live_requests_max = 5;
  Restart(o);
  mesh::WorkerMessage m = TestRegister("d1", mesh::ROLE_DECODE);
  m.mutable_register_()->mutable_capacity()->set_slabs(1);
  Open(kDecode, m);
  ASSERT_TRUE(Submit("a", 10).ok());
  ASSERT_TRUE(Submit("b", 10).ok());
  ASSERT_TRUE(Submit("c", 10).ok());
  const absl::Status full = Submit("d", 10);
  EXPECT_EQ(full.ToString(),
            "RESOURCE_EXHAUSTED: 2 requests wait for a worker, the router's bound for a tenant; "
            "retry later "
            "[deltamesh.retry-after-ms='1000']");
  EXPECT_EQ(core->gauges().live, 3);
  EXPECT_EQ(core->counters().rejected, 1u);
}

TEST_F(RequestTest, WaitingTooLongEndsWithRetryLater) {
  for (const std::string id : {"a", "b", "c", "d", "e"}) ASSERT_TRUE(Submit(id, 10).ok());
  Drain();
  Pass(absl::Seconds(61), {kDecode, kPrefill});
  EXPECT_EQ(Drain(),
            "client e failed RESOURCE_EXHAUSTED: waited 1m for a worker with room; retry later\n");
}

TEST_F(RequestTest, DeadlineFreesEverythingEverywhere) {
  ClientRequest r = Make("a", 100);
  r.deadline = now + absl::Seconds(2);
  ASSERT_TRUE(core->Submit(r, now).ok());
  Grant(kDecode, "a", 64, 1);
  Drain();
  Pass(absl::Seconds(2), {kDecode, kPrefill});
  EXPECT_EQ(
      Drain(),
      "2 <- Cancel a\n1 <- Cancel a\n"
      "client a failed DEADLINE_EXCEEDED: the request's deadline passed after 0 of 8 tokens\n");
  r.request_id = "b";
  EXPECT_EQ(core->Submit(r, now).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(RequestTest, UnansweredLandingEnds) {
  ASSERT_TRUE(Submit("a", 100).ok());
  Drain();
  Pass(absl::Seconds(11), {kDecode, kPrefill});
  EXPECT_EQ(Drain(),
            "2 <- Cancel a\n1 <- Cancel a\n"
            "client a failed UNAVAILABLE: decode worker \"d1\" granted no landing within 10s\n");
}

TEST_F(RequestTest, DuplicateTokensAreDroppedAndGapsRefused) {
  ASSERT_TRUE(Submit("a", 10).ok());
  Drain();
  Tokens(kDecode, "a", {1, 2}, 0);
  Tokens(kDecode, "a", {1, 2}, 0);
  Tokens(kDecode, "a", {2, 3}, 1);
  EXPECT_EQ(Drain(), "client a tokens [1 2] at 0\nclient a tokens [3] at 2\n");
  EXPECT_EQ(core->counters().stale_messages, 2u);
  Tokens(kDecode, "a", {5}, 4);
  EXPECT_EQ(Drain(),
            "2 <- Cancel a\nclient a failed INTERNAL: decode worker \"d1\" sent: 1 tokens from "
            "index 4 with 0 scores after 3 of 8\n");
  EXPECT_EQ(core->counters().malformed_messages, 1u);
}

TEST_F(RequestTest, MoreTokensThanAskedForAreRefused) {
  ASSERT_TRUE(Submit("a", 10, 2).ok());
  Drain();
  Tokens(kDecode, "a", {1, 2, 3}, 0);
  EXPECT_EQ(core->gauges().live, 0);
}

TEST_F(RequestTest, OutputThatCannotBeTrueEndsTheRequest) {
  RouterOptions options = DefaultOptions();
  options.vocab = 100;
  Restart(options);
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  const auto score = [](mesh::SequenceOutput* o, float logprob) {
    o->add_scores()->set_logprob(logprob);
    return o->mutable_scores(o->scores_size() - 1);
  };
  const auto alternative = [](mesh::TokenScores* s, int id, float logprob) {
    s->add_top_ids(id);
    s->add_top_logprobs(logprob);
  };
  const float infinity = std::numeric_limits<float>::infinity();
  struct Case {
    std::function<void(mesh::SequenceOutput*)> change;
    std::string expect;  // empty: a good output
  };
  const std::vector<Case> cases = {
      {[&](auto* o) { alternative(score(o, -1), 99, -1); }, ""},
      {[](auto* o) { o->set_first_index(~uint64_t{0}); }, "index 18446744073709551615"},
      {[](auto* o) { o->set_first_index(uint64_t{1} << 63); }, "index 9223372036854775808"},
      {[](auto* o) { o->set_tokens(0, -1); }, "token -1 is outside the vocabulary of 100"},
      {[](auto* o) { o->set_tokens(0, 100); }, "token 100 is outside"},
      {[](auto* o) { o->set_end(static_cast<mesh::SequenceOutput::End>(77)); }, "end 77"},
      {[](auto* o) { o->set_end(mesh::SequenceOutput::MAX_TOKENS); }, "MAX_TOKENS after 1 of 8"},
      {[&](auto* o) { score(o, std::nanf("")); }, "not a finite"},
      {[&](auto* o) { alternative(score(o, -1), 1, -infinity); }, "not a finite"},
      {[&](auto* o) { score(o, -1), score(o, -1); }, "2 scores"},
      {[&](auto* o) { score(o, -1)->add_top_ids(1); }, "1 alternatives with 0 scores"},
      {[&](auto* o) { alternative(score(o, -1), 100, -1); }, "token 100 is outside"},
      {[&](auto* o) {
         mesh::TokenScores* s = score(o, -1);
         for (int i = 0; i < 3; ++i) alternative(s, i, -1);
       },
       "3 alternatives with 3 scores, 2 were asked for"},
  };
  uint64_t malformed = 0;
  for (const Case& c : cases) {
    ClientRequest request = Make("a", 10);
    request.sampling.set_logprobs(2);
    ASSERT_TRUE(core->Submit(request, now).ok());
    Drain();
    mesh::WorkerMessage m;
    mesh::SequenceOutput* o = m.mutable_outputs()->add_sequences();
    o->set_request_id("a");
    o->set_attempt(attempts["a"]);
    o->add_tokens(5);
    c.change(o);
    Send(kDecode, m);
    if (c.expect.empty()) {
      EXPECT_EQ(Drain(), "client a tokens [5] at 0\n");
      EXPECT_TRUE(core->CancelClient("a", now));
      Drain();
      continue;
    }
    const std::string out = Drain();
    EXPECT_THAT(out, ::testing::StartsWith("2 <- Cancel a\nclient a failed INTERNAL: decode "));
    EXPECT_THAT(out, ::testing::HasSubstr(c.expect));
    EXPECT_EQ(core->counters().malformed_messages, ++malformed);
    EXPECT_EQ(core->gauges().live, 0);
  }
}

TEST_F(RequestTest, AnswersDoNotEndBeforeWhatWasSent) {
  ASSERT_TRUE(Submit("a", 10).ok());
  Drain();
  Tokens(kDecode, "a", {1, 2, 3}, 0);
  Drain();
  Tokens(kDecode, "a", {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_THAT(Drain(), ::testing::HasSubstr("ends at 1 tokens, 3 were sent before"));
}

TEST_F(RequestTest, TokensOfAnotherWorkersRequestAreStale) {
  Join(kDecode2, "d2", mesh::ROLE_DECODE);
  ASSERT_TRUE(Submit("a", 10).ok());
  const LinkId other = Drain()[0] == '2' ? kDecode2 : kDecode;
  Tokens(other, "a", {1}, 0);
  Tokens(kDecode, "nobody", {1}, 0);
  EXPECT_EQ(Drain(), "");
  EXPECT_EQ(core->counters().stale_messages, 2u);
}

TEST_F(RequestTest, CompletedByItsClientCountsAsFinished) {
  ASSERT_TRUE(Submit("a", 10).ok());
  Drain();
  Tokens(kDecode, "a", {1, 2}, 0);
  Drain();
  EXPECT_TRUE(core->CompleteClient("a", 0, now));
  EXPECT_EQ(Drain(), "2 <- Cancel a\n");
  EXPECT_EQ(core->counters().finished, 1u);
  EXPECT_EQ(core->counters().cancelled, 0u);
  EXPECT_FALSE(core->CompleteClient("a", 0, now));
}

TEST_F(RequestTest, CancelIsSilentAndIdempotent) {
  ASSERT_TRUE(Submit("a", 100).ok());
  Grant(kDecode, "a", 64, 1);
  Drain();
  EXPECT_TRUE(core->CancelClient("a", now));
  EXPECT_EQ(Drain(), "2 <- Cancel a\n1 <- Cancel a\n");
  EXPECT_FALSE(core->CancelClient("a", now));
  EXPECT_EQ(Drain(), "");
}

TEST_F(RequestTest, RefusalsBeforeAnyWorkNameTheThing) {
  EXPECT_EQ(Submit("a", 0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      Submit("a", 2048).ToString(),
      "INVALID_ARGUMENT: prompt: 2048 tokens leave no room for an answer in a context of 2048; "
      "shorten it");
  ASSERT_TRUE(Submit("a", 10).ok());
  EXPECT_EQ(Submit("a", 10).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(core->counters().rejected, 3u);
}

TEST_F(RequestTest, MaxTokensIsCutToTheContextAndDefaultsToIt) {
  ASSERT_TRUE(Submit("a", 48, 0).ok());
  EXPECT_EQ(Drain(), "2 <- StartDecode a prompt=48 handoff=0 max=2000 attempt=1\n");
  core->CancelClient("a", now);
  Drain();
  ASSERT_TRUE(Submit("b", 48, 100000).ok());
  EXPECT_EQ(Drain(), "2 <- StartDecode b prompt=48 handoff=0 max=2000 attempt=17\n");
}

TEST_F(RequestTest, DrainingWorkersGetNothingNew) {
  Join(kDecode2, "d2", mesh::ROLE_DECODE);
  Beat(kDecode, 4, 64, 0, true);
  for (const std::string id : {"a", "b", "c"}) {
    ASSERT_TRUE(Submit(id, 10).ok());
    EXPECT_EQ(Drain()[0], '4');
  }
  Beat(kDecode2, 4, 64, 0, true);
  EXPECT_EQ(Submit("d", 10).ToString(),
            "UNAVAILABLE: all 2 decode workers are draining; retry when others are up");
}

TEST_F(RequestTest, LosingTheLastDecodeWorkerFailsWhoWaits) {
  for (const std::string id : {"a", "b", "c", "d", "e"}) ASSERT_TRUE(Submit(id, 10).ok());
  Drain();
  core->OnLinkClosed(kDecode, absl::UnavailableError("reset"), now);
  EXPECT_EQ(core->gauges().live, 0);
  EXPECT_THAT(Drain(), ::testing::HasSubstr("client e failed UNAVAILABLE: no decode worker"));
}

}  // namespace
}  // namespace deltamesh
