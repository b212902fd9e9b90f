// What a mesh does when clients leave, deadlines pass, bytes change on their way and processes die.
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/mesh/requests.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {
namespace {

class MeshFailureTest : public ::testing::Test {
 protected:
  MeshFailureTest() {
    InitLog("test", LogLevel::kError);
    options_.folder = Golden("kimi_k3");
  }

  void Start() {
    mesh_ = std::make_unique<TestMesh>(options_);
    mesh_->Start();
    plain_ = std::make_unique<PlainEngine>(options_.folder);
  }
  ClientRequest SubmitOne(const std::string& id, int64_t prompt, int64_t max_tokens = 12) {
    ClientRequest request = MakeRequest(id, prompt, max_tokens, 100 + prompt);
    EXPECT_TRUE(mesh_->Submit(request).ok());
    return request;
  }
  void ExpectPlainAnswer(const ClientRequest& request) {
    const Answer& answer = mesh_->answer(request.request_id);
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_TRUE(SameAnswer(answer, plain_->Run(request))) << Describe(answer);
  }
  bool BaselineWithinASecond() {
    return mesh_->RunUntil([&] { return mesh_->AtBaseline(); }, absl::Seconds(1));
  }

  TestMeshOptions options_;
  std::unique_ptr<TestMesh> mesh_;
  std::unique_ptr<PlainEngine> plain_;
};

// ---- cancel and deadline -------------------------------------------------------------------------

// At every moment of a request's life, round by round until it ended.
TEST_F(MeshFailureTest, CancelAtAnyMomentFreesEverythingWithinASecond) {
  options_.decode = 2;
  Start();
  int moments = 0;
  for (int rounds = 0;; ++rounds) {
    const std::string id = absl::StrFormat("c%d", rounds);
    SubmitOne(id, 200, 6);
    for (int i = 0; i < rounds; ++i) mesh_->Round();
    // The router may have ended it and not said so yet.
    if (mesh_->answer(id).ended || !mesh_->Cancel(id)) break;
    ++moments;
    ASSERT_TRUE(BaselineWithinASecond()) << "cancelled after " << rounds << " rounds";
    EXPECT_FALSE(mesh_->answer(id).ended);
    ASSERT_LT(rounds, 200);
  }
  EXPECT_GT(moments, 8);
}

TEST_F(MeshFailureTest, DeadlineAtAnyMomentFreesEverythingWithinASecond) {
  Start();
  for (int millis = 1; millis < 80; millis += 6) {
    ClientRequest request = MakeRequest(absl::StrFormat("d%d", millis), 200, 200, 4);
    request.deadline = mesh_->now() + absl::Milliseconds(millis);
    ASSERT_TRUE(mesh_->Submit(request).ok());
    ASSERT_TRUE(mesh_->RunUntilEnded({request.request_id}, absl::Seconds(2)));
    EXPECT_EQ(mesh_->answer(request.request_id).status.code(), absl::StatusCode::kDeadlineExceeded);
    ASSERT_TRUE(BaselineWithinASecond());
  }
}

// Transfers, steps and messages of the first request are still under way when the second one of the same
// name begins.
TEST_F(MeshFailureTest, NameUsedAgainAtOnceGetsItsOwnAnswer) {
  Start();
  for (int rounds = 0; rounds < 16; ++rounds) {
    ASSERT_TRUE(mesh_->Submit(MakeRequest("same", 200, 6, 100)).ok());
    for (int i = 0; i < rounds; ++i) mesh_->Round();
    mesh_->Cancel("same");
    const ClientRequest again = MakeRequest("same", 200, 6, 200 + rounds);
    ASSERT_TRUE(mesh_->Submit(again).ok());
    ASSERT_TRUE(mesh_->RunUntilEnded({"same"})) << rounds << " rounds after the first";
    ExpectPlainAnswer(again);
    ASSERT_TRUE(BaselineWithinASecond());
  }
}

// ---- drain ---------------------------------------------------------------------------------------

TEST_F(MeshFailureTest, DrainingWorkersFinishWhatTheyHaveAndGetNothingNew) {
  options_.prefill = 2;
  options_.decode = 2;
  Start();
  std::vector<ClientRequest> running;
  for (int i = 0; i < 4; ++i) running.push_back(SubmitOne(absl::StrFormat("r%d", i), 140 + i, 60));
  mesh_->RunFor(absl::Milliseconds(30));
  mesh_->decode("decode-0").Drain(mesh_->now());
  mesh_->prefill("prefill-0").Drain(mesh_->now());
  ASSERT_TRUE(mesh_->RunUntilEnded({"r0", "r1", "r2", "r3"}));
  for (const ClientRequest& request : running) ExpectPlainAnswer(request);
  ASSERT_TRUE(BaselineWithinASecond());

  const ClientRequest next = SubmitOne("next", 200);
  ASSERT_TRUE(mesh_->RunUntil([&] { return !mesh_->answer("next").tokens.empty(); }));
  EXPECT_TRUE(mesh_->decode("decode-0").Idle());
  EXPECT_FALSE(mesh_->decode("decode-1").Idle());
  ASSERT_TRUE(mesh_->RunUntilEnded({"next"}));
  ExpectPlainAnswer(next);
}

// The router hears of a drain a moment later: what it sent before that is nobody's failure.
TEST_F(MeshFailureTest, RequestsOnTheirWayToADrainingWorkerGoToAnother) {
  options_.prefill = 2;
  options_.decode = 2;
  Start();
  std::vector<ClientRequest> sent;
  for (int i = 0; i < 4; ++i) sent.push_back(SubmitOne(absl::StrFormat("r%d", i), 40 + 60 * i, 60));
  mesh_->decode("decode-0").Drain(mesh_->now());
  mesh_->prefill("prefill-0").Drain(mesh_->now());
  ASSERT_TRUE(mesh_->RunUntilEnded({"r0", "r1", "r2", "r3"}));
  for (const ClientRequest& request : sent) ExpectPlainAnswer(request);
  EXPECT_GT(mesh_->router().counters().placement_refusals, 0u) << "none was on its way";
  ASSERT_TRUE(BaselineWithinASecond());
}

// ---- damaged hand-offs ---------------------------------------------------------------------------

struct Damage {
  const char* name;
  MessageType type;
  InprocFault fault;
  std::string reason;  // as the router counts it; empty: any
};

class MeshDamageTest : public MeshFailureTest, public ::testing::WithParamInterface<Damage> {};

TEST_P(MeshDamageTest, IsRefusedByNameAndPrefilledAgainWithTheSameAnswer) {
  Start();
  bool done = false;
  mesh_->network().SetFault([&](const InprocMessage& message) {
    if (done || message.type != GetParam().type) return InprocFault();
    done = true;
    return GetParam().fault;
  });
  const ClientRequest request = SubmitOne("a", 200);
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}, absl::Minutes(3)));
  EXPECT_TRUE(done);
  ExpectPlainAnswer(request);
  const RouterCounters& counters = mesh_->router().counters();
  EXPECT_EQ(counters.handoffs_refused, 1u);
  EXPECT_EQ(counters.handoffs_ok, 1u);
  if (!GetParam().reason.empty()) {
    bool counted = false;
    for (const auto& [reason, count] : counters.handoff_results) {
      if (reason == GetParam().reason) counted = count == 1;
    }
    EXPECT_TRUE(counted) << GetParam().reason;
  }
  EXPECT_TRUE(BaselineWithinASecond());
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, MeshDamageTest,
    ::testing::Values(
        Damage{
            "FlippedByte", MessageType::kHandoffSegment, {.flip_payload_byte = 1000}, "CHECKSUM"},
        Damage{"LostSegment", MessageType::kHandoffSegment, {.drop = true}, "INCOMPLETE"},
        Damage{"DoubledSegment", MessageType::kHandoffSegment, {.duplicate = true}, "WRONG_RANGE"},
        Damage{"LostSeal", MessageType::kHandoffSeal, {.drop = true}, "TIMEOUT"}),
    [](const auto& info) { return info.param.name; });

// ---- hand-offs that are whole, but not what was granted -------------------------------------------

struct Forgery {
  const char* name;
  std::function<void(mesh::Manifest&)> change;
  // As the router hears it from the landing. Empty: no landing is touched, and the sender reports it.
  std::string reason;
};

class MeshForgeryTest : public MeshFailureTest, public ::testing::WithParamInterface<Forgery> {};

TEST_P(MeshForgeryTest, IsRefusedByNameAndPrefilledAgainWithTheSameAnswer) {
  Start();
  bool done = false;
  mesh_->SetRewrite([&](MessageType type, std::string& header, std::string& payload) {
    if (done || type != MessageType::kHandoffManifest) return false;
    done = true;
    const bool in_header = payload.empty();  // when it is short
    mesh::Manifest manifest;
    CHECK(manifest.ParseFromString(in_header ? header : payload));
    GetParam().change(manifest);
    (in_header ? header : payload) = manifest.SerializeAsString();
    if (in_header) return true;
    mesh::Manifest key_only;
    *key_only.mutable_key() = manifest.key();
    header = key_only.SerializeAsString();
    return true;
  });
  const ClientRequest request = SubmitOne("a", 200);
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}, absl::Minutes(3)));
  EXPECT_TRUE(done);
  ExpectPlainAnswer(request);
  const RouterCounters& counters = mesh_->router().counters();
  EXPECT_EQ(counters.handoffs_refused, GetParam().reason.empty() ? 0u : 1u);
  EXPECT_EQ(counters.handoffs_ok, 1u);
  const auto count_of = [](const auto& counts, const std::string& name) {
    for (const auto& [reason, count] : counts) {
      if (reason == name) return static_cast<double>(count);
    }
    return 0.0;
  };
  if (!GetParam().reason.empty()) {
    EXPECT_EQ(count_of(counters.handoff_results, GetParam().reason), 1);
  }
  EXPECT_TRUE(BaselineWithinASecond());
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, MeshForgeryTest,
    ::testing::Values(
        Forgery{"MissingRegion",
                [](mesh::Manifest& m) { m.mutable_regions()->DeleteSubrange(2, 1); },
                "WRONG_REGION"},
        Forgery{"WrongCountOfARegion",
                [](mesh::Manifest& m) { m.mutable_regions(1)->set_token_count(191); },
                "WRONG_COUNT"},
        Forgery{"WrongPosition", [](mesh::Manifest& m) { m.set_position(128); }, "WRONG_COUNT"},
        Forgery{"StaleEpoch",
                [](mesh::Manifest& m) {
                  m.mutable_key()->set_receiver_epoch(m.key().receiver_epoch() - 1);
                },
                "STALE_EPOCH"},
        Forgery{
            "WrongId",
            [](mesh::Manifest& m) { m.mutable_key()->set_transfer_id(m.key().transfer_id() + 1); },
            ""},
        Forgery{"WrongToken",
                [](mesh::Manifest& m) { m.mutable_key()->set_token_low(m.key().token_low() ^ 1); },
                ""},
        Forgery{"WrongRequest", [](mesh::Manifest& m) { m.set_request_id("b"); },
                "UNKNOWN_TRANSFER"}),
    [](const auto& info) { return info.param.name; });

// Only the sender can know: it reports, and the router places the request anew.
TEST_F(MeshFailureTest, LostManifestIsReportedByTheSender) {
  Start();
  bool done = false;
  mesh_->network().SetFault([&](const InprocMessage& message) {
    if (done || message.type != MessageType::kHandoffManifest) return InprocFault();
    done = true;
    return InprocFault{.drop = true};
  });
  const ClientRequest request = SubmitOne("a", 200);
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}, kHandoffIdleMax + absl::Seconds(5)));
  EXPECT_TRUE(done);
  ExpectPlainAnswer(request);
  EXPECT_EQ(mesh_->router().counters().handoffs_refused, 0u);
  EXPECT_EQ(mesh_->router().counters().handoffs_ok, 1u);
  EXPECT_TRUE(BaselineWithinASecond());
}

// A landing that nobody fills is the decode worker's to give up; the prompt's room stays for the next try.
TEST_F(MeshFailureTest, LandingThatNobodyFillsIsGivenUpAndPrefilledAgain) {
  options_.unclaimed_max = absl::Seconds(4);
  Start();
  mesh_->SetDeaf("prefill-0", true);
  const ClientRequest request = SubmitOne("a", 200);
  ASSERT_TRUE(mesh_->RunUntil([&] { return mesh_->decode("decode-0").landing() == 1; }));
  mesh_->RunFor(options_.unclaimed_max - absl::Milliseconds(100));
  EXPECT_EQ(mesh_->router().counters().handoffs_refused, 0u);
  mesh_->RunFor(absl::Milliseconds(50));
  mesh_->SetDeaf("prefill-0", false);
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}, absl::Seconds(2)));
  ExpectPlainAnswer(request);
  EXPECT_EQ(mesh_->router().counters().handoffs_refused, 1u);
  EXPECT_TRUE(BaselineWithinASecond());
}

TEST_F(MeshFailureTest, LandingThatNobodyFillsEndsWithItsRequest) {
  Start();
  mesh_->SetDeaf("prefill-0", true);
  SubmitOne("a", 200);
  ASSERT_TRUE(mesh_->RunUntil([&] { return mesh_->decode("decode-0").landing() == 1; }));
  EXPECT_FALSE(mesh_->AtBaseline());
  EXPECT_TRUE(mesh_->Cancel("a"));
  EXPECT_TRUE(BaselineWithinASecond());
}

// A canary: without the checksum the same damage reaches the answer, so the test above does see it.
TEST_F(MeshFailureTest, WithoutChecksumsDamageReachesTheAnswer) {
  options_.verify_checksums = false;
  Start();
  bool done = false;
  mesh_->network().SetFault([&](const InprocMessage& message) {
    if (std::exchange(done, done || message.type == MessageType::kHandoffSegment)) {
      return InprocFault();
    }
    // The exponent of a value in the last token's part of a region.
    return InprocFault{.flip_payload_byte = done ? 4 * 700 + 3 : -1, .flip_mask = 0x20};
  });
  const ClientRequest request = SubmitOne("a", 200);
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}));
  EXPECT_TRUE(done);
  EXPECT_FALSE(SameAnswer(mesh_->answer("a"), plain_->Run(request)));
}

// Numbers that are none come from a damaged state or damaged weights. Asking again would not help, so the
// client must not be told that something is unavailable.
TEST_F(MeshFailureTest, StateThatGivesNoNumbersIsDataLoss) {
  options_.verify_checksums = false;
  Start();
  mesh_->network().SetFault([&](const InprocMessage& message) {
    const bool hit = message.type == MessageType::kHandoffSegment;
    return InprocFault{.flip_payload_byte = hit ? 3 : -1, .flip_mask = 0x40};  // exponents of 2^128
  });
  SubmitOne("a", 200);
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}));
  EXPECT_EQ(mesh_->answer("a").status.code(), absl::StatusCode::kDataLoss)
      << mesh_->answer("a").status;
  EXPECT_TRUE(BaselineWithinASecond());
}

TEST_F(MeshFailureTest, SilentAndDamagedExpertAnswersAreUnavailable) {
  Start();
  for (const bool silent : {true, false}) {
    mesh_->network().SetFault([&](const InprocMessage& message) {
      const bool hit = message.type == MessageType::kExpertCombine;
      return InprocFault{.drop = hit && silent, .flip_payload_byte = hit && !silent ? 3 : -1};
    });
    const std::string id = silent ? "silent" : "damaged";
    SubmitOne(id, 30);
    ASSERT_TRUE(mesh_->RunUntilEnded({id}));
    EXPECT_EQ(mesh_->answer(id).status.code(), absl::StatusCode::kUnavailable)
        << mesh_->answer(id).status;
    EXPECT_TRUE(BaselineWithinASecond());
  }
}

TEST_F(MeshFailureTest, HandoffsThatNeverSucceedEndTheRequest) {
  Start();
  mesh_->network().SetFault([&](const InprocMessage& message) {
    return InprocFault{.flip_payload_byte = message.type == MessageType::kHandoffSegment ? 5 : -1};
  });
  SubmitOne("a", 200);
  const ClientRequest other = SubmitOne("b", 30);  // needs no hand-off
  ASSERT_TRUE(mesh_->RunUntilEnded({"a", "b"}));
  EXPECT_EQ(mesh_->answer("a").status.code(), absl::StatusCode::kDataLoss)
      << mesh_->answer("a").status;
  ExpectPlainAnswer(other);
  EXPECT_TRUE(BaselineWithinASecond());
}

// ---- lost processes ------------------------------------------------------------------------------

TEST_F(MeshFailureTest, LostDecodeWorkerFailsItsRequestsOnly) {
  options_.decode = 2;
  Start();
  std::vector<ClientRequest> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(SubmitOne(absl::StrFormat("r%d", i), 90 + i, 40));
  ASSERT_TRUE(mesh_->RunUntil([&] {
    return std::all_of(requests.begin(), requests.end(), [&](const ClientRequest& r) {
      return !mesh_->answer(r.request_id).tokens.empty();
    });
  }));
  mesh_->Kill("decode-0");
  ASSERT_TRUE(mesh_->RunUntilEnded({"r0", "r1", "r2", "r3"}));
  int lost = 0;
  for (const ClientRequest& request : requests) {
    const Answer& answer = mesh_->answer(request.request_id);
    if (answer.status.ok()) {
      ExpectPlainAnswer(request);
    } else {
      ++lost;
      EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
    }
  }
  EXPECT_GT(lost, 0);
  EXPECT_LT(lost, 4);
  const ClientRequest next = SubmitOne("next", 150);
  ASSERT_TRUE(mesh_->RunUntilEnded({"next"}));
  ExpectPlainAnswer(next);
  EXPECT_TRUE(BaselineWithinASecond());
}

TEST_F(MeshFailureTest, LostPrefillWorkerDelaysTheFirstToken) {
  options_.prefill = 2;
  Start();
  for (int rounds = 1; rounds < 12; ++rounds) {
    const std::string id = absl::StrFormat("p%d", rounds);
    const ClientRequest request = SubmitOne(id, 330);
    for (int i = 0; i < rounds; ++i) mesh_->Round();
    mesh_->Kill("prefill-0");
    ASSERT_TRUE(mesh_->RunUntilEnded({id})) << rounds;
    ExpectPlainAnswer(request);
    ASSERT_TRUE(BaselineWithinASecond()) << rounds;
    mesh_->Restart("prefill-0");
    mesh_->RunFor(absl::Milliseconds(100));
  }
}

TEST_F(MeshFailureTest, WithoutPrefillWorkersDecodeComputesThePrompt) {
  Start();
  mesh_->Kill("prefill-0");
  const ClientRequest request = SubmitOne("a", 200);
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}));
  ExpectPlainAnswer(request);
}

TEST_F(MeshFailureTest, LostExpertShardIsUnavailableUntilItIsBack) {
  Start();
  SubmitOne("a", 100, 60);
  ASSERT_TRUE(mesh_->RunUntil([&] { return !mesh_->answer("a").tokens.empty(); }));
  mesh_->Kill("expert-1");
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}, absl::Seconds(5)));
  EXPECT_EQ(mesh_->answer("a").status.code(), absl::StatusCode::kUnavailable)
      << mesh_->answer("a").status;
  EXPECT_TRUE(BaselineWithinASecond());
  EXPECT_FALSE(mesh_->Submit(MakeRequest("b", 20, 5, 1)).ok());

  mesh_->Restart("expert-1");
  mesh_->Start();
  const ClientRequest request = SubmitOne("c", 100);
  ASSERT_TRUE(mesh_->RunUntilEnded({"c"}));
  ExpectPlainAnswer(request);
}

TEST_F(MeshFailureTest, RestartedDecodeWorkerServesAgain) {
  Start();
  SubmitOne("a", 200, 60);
  mesh_->RunFor(absl::Milliseconds(15));
  mesh_->Restart("decode-0");
  ASSERT_TRUE(mesh_->RunUntilEnded({"a"}));
  EXPECT_EQ(mesh_->answer("a").status.code(), absl::StatusCode::kUnavailable);
  mesh_->Start();
  const ClientRequest request = SubmitOne("b", 200);
  ASSERT_TRUE(mesh_->RunUntilEnded({"b"}));
  ExpectPlainAnswer(request);
}

TEST_F(MeshFailureTest, WorkersFreeWhatALostRouterHeld) {
  Start();
  SubmitOne("a", 200, 60);
  SubmitOne("b", 40, 60);
  mesh_->RunFor(absl::Milliseconds(40));
  EXPECT_FALSE(mesh_->AtBaseline());
  mesh_->RestartRouter();
  EXPECT_TRUE(BaselineWithinASecond());
  mesh_->Start();
  const ClientRequest request = SubmitOne("c", 100);
  ASSERT_TRUE(mesh_->RunUntilEnded({"c"}));
  ExpectPlainAnswer(request);
}

}  // namespace
}  // namespace deltamesh::testing
