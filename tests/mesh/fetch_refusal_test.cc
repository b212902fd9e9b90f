// Fetches that go wrong: whatever is lost, stale, foreign or damaged is refused by name and counted, the
// prompt is computed, and the answer is the same.
#include <memory>

#include "deltamesh/mesh/fetch.pb.h"
#include "runtime/prefix/prefix_hash.h"
#include "tests/mesh/fetch_fixture.h"

namespace deltamesh::testing {
namespace {

class FetchRefusalTest : public MeshFetchTest {
 protected:
  FetchRefusalTest() : mesh_(Make()) { mesh_.Start(); }
  TestMeshOptions Make() {
    InitLog("test", LogLevel::kError);
    TestMeshOptions options = Options();
    options.fetch.claim_max = absl::Seconds(1);
    options.fetch.whole_max = absl::Seconds(3);
    return options;
  }
  // A turn whose state `holder_` has, which is to be computed by the other decode worker.
  ClientRequest Prepare() {
    const ClientRequest turn = NextTurn(mesh_, "s", 45, 71, &holder_);
    Shun(mesh_, holder_);
    return turn;
  }
  // The turn ends in time, with the right answer, and without what was refused as `reason`.
  void Refused(const ClientRequest& turn, const std::string& reason) {
    const Decision& d = ExpectFetchRefused(mesh_, turn, reason);
    EXPECT_EQ(d.fetched_tokens, 0);
    EXPECT_EQ(Sample(mesh_.decode(Other(holder_)).Metrics(), "fetches_total", reason), 1);
    mesh_.network().SetFault(nullptr);
    mesh_.SetRewrite(nullptr);
    mesh_.SetHeard(nullptr);
    EXPECT_TRUE(mesh_.RunUntil([&] { return mesh_.AtBaseline(); }, absl::Seconds(12)));
  }
  // From now on no message of this type arrives, before somebody waited for one in vain.
  void Lose(MessageType type) {
    mesh_.network().SetFault([this, type](const InprocMessage& m) {
      InprocFault fault;
      fault.drop = m.type == type && mesh_.router().counters().fetch_results.empty();
      return fault;
    });
  }
  // Once, when the request to fetch is on its way.
  void WhenAsked(std::function<void(mesh::FetchSource& source)> act) {
    mesh_.SetHeard([act = std::move(act)](const std::string&, mesh::RouterMessage& message) {
      if (message.has_start_decode() && message.start_decode().has_fetch()) {
        act(*message.mutable_start_decode()->mutable_fetch());
      }
    });
  }
  // The name of its first `blocks` blocks, for who has no salt.
  PrefixKey KeyAt(const ClientRequest& request, int64_t blocks) {
    const Model& model = SharedModel(Golden(GetParam()), {});
    PrefixChain chain(PrefixModel(model.digest(), kStateLayoutVersion), "");
    chain.Append(request.prompt);
    return chain.keys()[static_cast<size_t>(blocks - 1)];
  }
  // Writes an ask anew.
  void RewriteAsk(std::function<void(mesh::StateFetch& fetch)> change) {
    mesh_.SetRewrite(
        [change = std::move(change)](MessageType type, std::string& header, std::string&) {
          mesh::StateFetch fetch;
          if (type != MessageType::kStateFetch || !fetch.ParseFromString(header)) return false;
          change(fetch);
          header = fetch.SerializeAsString();
          return true;
        });
  }
  bool Fetching() {
    return Sample(mesh_.decode(Other(holder_)).Metrics(), "requests", "fetching") > 0;
  }

  TestMesh mesh_;
  std::string holder_;
};

INSTANTIATE_TEST_SUITE_P(Families, FetchRefusalTest, ::testing::Values("kimi_k3", "kimi_linear"));

// What a worker is told to fetch may have come meanwhile: it says so, and nobody counts a fetch.
TEST_P(FetchRefusalTest, WhatIsThereAlreadyIsNotFetched) {
  ClientRequest turn = Prepare();
  mesh::FetchSource source;
  WhenAsked([&](mesh::FetchSource& asked) { source = asked; });
  AskCompared(mesh_, Golden(GetParam()), turn);
  ASSERT_EQ(Results(mesh_, "OK"), 1u);
  mesh_.SetHeard([&](const std::string&, mesh::RouterMessage& message) {
    if (message.has_start_decode()) *message.mutable_start_decode()->mutable_fetch() = source;
  });
  int said = 0;
  mesh_.SetLost([&](const std::string& from, mesh::WorkerMessage& message) {
    if (message.has_heartbeat() && from == holder_) message.mutable_heartbeat()->set_draining(true);
    said += message.has_fetch_result() && message.fetch_result().not_needed();
    return false;
  });
  turn.request_id = "again";
  EXPECT_GE(AskCompared(mesh_, Golden(GetParam()), turn).usage.cached_tokens, kHeld);
  EXPECT_EQ(said, 1);
  EXPECT_EQ(Results(mesh_, "OK"), 1u);
  EXPECT_EQ(mesh_.router().counters().fetch_results.size(), 1u);
  EXPECT_EQ(Sample(mesh_.decode(Other(holder_)).Metrics(), "fetches_total", "OK"), 1);
  EXPECT_EQ(Explained(mesh_, "again").fetch_refusal, "");
}

TEST_P(FetchRefusalTest, AFlippedByte) {
  const ClientRequest turn = Prepare();
  mesh_.network().SetFault([n = std::make_shared<int>(0)](const InprocMessage& m) {
    InprocFault fault;
    if (m.type == MessageType::kHandoffSegment && ++*n == 5) fault.flip_payload_byte = 77;
    return fault;
  });
  Refused(turn, "CHECKSUM");
}

TEST_P(FetchRefusalTest, AnEarlierLifeOfTheSource) {
  const ClientRequest turn = Prepare();
  WhenAsked([](mesh::FetchSource& source) { source.set_epoch(source.epoch() - 1); });
  Refused(turn, "STALE_EPOCH");
}

TEST_P(FetchRefusalTest, EvictedBetweenPlanAndFetch) {
  const ClientRequest turn = Prepare();
  WhenAsked([this](mesh::FetchSource&) { mesh_.cache(holder_).Clear(); });
  Refused(turn, "NOT_HELD");
}

TEST_P(FetchRefusalTest, AnotherModel) {
  const ClientRequest turn = Prepare();
  RewriteAsk([](mesh::StateFetch& fetch) { fetch.set_model_digest("another"); });
  Refused(turn, "WRONG_MODEL");
}

// The holder has the same tokens of another tenant too, and the question is bent to name those.
TEST_P(FetchRefusalTest, AStateOfAnotherTenant) {
  ClientRequest turn = Prepare();
  turn.cache.set_salt("mine");
  Welcome(mesh_, holder_);
  const std::string theirs = holder_;
  Shun(mesh_, Other(theirs));
  ClientRequest own = MakeRequest("own-1", kFirst, kAnswer, 71);
  own.cache.set_salt("mine");
  AskCompared(mesh_, Golden(GetParam()), own);
  Welcome(mesh_, Other(theirs));
  Shun(mesh_, theirs);
  const PrefixKey key = KeyAt(turn, kHeld / 64);
  ASSERT_TRUE(mesh_.cache(theirs).tree().HasSnapshot(key));
  RewriteAsk([&](mesh::StateFetch& fetch) {
    fetch.set_prefix({key.bytes.begin(), key.bytes.end()});
  });
  Refused(turn, "WRONG_PREFIX");
}

// Who does not know the salt cannot name a state, and who guesses is told nothing but that it is not there.
TEST_P(FetchRefusalTest, APrefixThatNobodyHas) {
  const ClientRequest turn = Prepare();
  RewriteAsk([](mesh::StateFetch& fetch) { fetch.set_prefix(std::string(16, 'x')); });
  Refused(turn, "NOT_HELD");
}

// A shallower state of the same prompt.
TEST_P(FetchRefusalTest, APositionThatIsNotThePrefixs) {
  const ClientRequest turn = Prepare();
  const PrefixKey key = KeyAt(turn, kFirst / 64);
  ASSERT_TRUE(mesh_.cache(holder_).tree().HasSnapshot(key));
  RewriteAsk([&](mesh::StateFetch& fetch) {
    fetch.set_prefix({key.bytes.begin(), key.bytes.end()});
  });
  Refused(turn, "WRONG_COUNT");
}

TEST_P(FetchRefusalTest, NobodyAnswersTheQuestion) {
  const ClientRequest turn = Prepare();
  Lose(MessageType::kStateFetch);
  Refused(turn, "TIMEOUT");
}

TEST_P(FetchRefusalTest, ItNeverEnds) {
  const ClientRequest turn = Prepare();
  Lose(MessageType::kHandoffSeal);
  Refused(turn, "TIMEOUT");
}

TEST_P(FetchRefusalTest, TheSourceDies) {
  const ClientRequest turn = Prepare();
  Lose(MessageType::kHandoffSeal);
  CHECK_OK(mesh_.Submit(turn));
  ASSERT_TRUE(mesh_.RunUntil([&] { return Fetching(); }, absl::Seconds(2)));
  mesh_.Kill(holder_);
  ASSERT_TRUE(mesh_.RunUntilEnded({turn.request_id}, absl::Seconds(2)));
  PlainEngine plain(Golden(GetParam()));
  EXPECT_TRUE(SameAnswer(mesh_.answer(turn.request_id), plain.Run(turn)));
  EXPECT_EQ(Results(mesh_, "PEER_LOST"), 1u);
  EXPECT_TRUE(mesh_.RunUntil([&] { return mesh_.AtBaseline(); }, absl::Seconds(12)));
}

TEST_P(FetchRefusalTest, ACancelEndsTheFetchAtBothEnds) {
  const ClientRequest turn = Prepare();
  Lose(MessageType::kHandoffSeal);
  CHECK_OK(mesh_.Submit(turn));
  ASSERT_TRUE(mesh_.RunUntil([&] { return Fetching(); }, absl::Seconds(2)));
  mesh_.RunFor(absl::Milliseconds(50));
  EXPECT_EQ(Sample(mesh_.decode(holder_).Metrics(), "fetches_serving"), 1);
  mesh_.Cancel(turn.request_id);
  EXPECT_TRUE(mesh_.RunUntil([&] { return mesh_.AtBaseline(); }, absl::Seconds(1)));
  EXPECT_EQ(Sample(mesh_.decode(Other(holder_)).Metrics(), "fetches_total", "CANCELLED"), 1);
}

// The worker that was chosen because it had little left to compute does not compute all of it.
TEST_P(FetchRefusalTest, WithoutTheStateThePromptGoesToWhoComputesItBest) {
  const ClientRequest turn = Prepare();
  Pretend(mesh_, Other(holder_), [](mesh::Heartbeat& b) { b.set_prompt_tokens_per_second(100); });
  Pretend(mesh_, "prefill-0", [](mesh::Heartbeat& b) { b.set_prompt_tokens_per_second(200); });
  Lose(MessageType::kStateFetch);
  Refused(turn, "TIMEOUT");
  const Decision& d = Explained(mesh_, turn.request_id);
  EXPECT_EQ(d.placements, 2);
  EXPECT_EQ(d.candidates[d.chosen].prefill, "prefill-0");
}

// What is being sent stays whatever the cache drops.
TEST_P(FetchRefusalTest, WhatIsSentIsPinned) {
  const ClientRequest turn = Prepare();
  mesh_.network().SetFault([this, n = std::make_shared<int>(0)](const InprocMessage& m) {
    if (m.type == MessageType::kHandoffSegment && ++*n == 2) mesh_.cache(holder_).Clear();
    return InprocFault();
  });
  EXPECT_EQ(AskCompared(mesh_, Golden(GetParam()), turn).usage.cached_tokens, kHeld);
  EXPECT_EQ(Results(mesh_, "OK"), 1u);
}

// Beyond the bound of the source, and of the one that wants it.
TEST_P(FetchRefusalTest, TooManyAtOnceAreComputed) {
  TestMeshOptions options = Make();
  options.fetch.open_max = 1;
  options.router.disaggregation = Disaggregation::kNever;  // both where the answers are generated
  TestMesh mesh(options);
  mesh.Start();
  std::string one, two;
  const ClientRequest a = NextTurn(mesh, "a", 45, 81, &one);
  Shun(mesh, Other(one));
  const ClientRequest b = NextTurn(mesh, "b", 45, 83, &two);
  ASSERT_EQ(one, two);
  Welcome(mesh, Other(one));
  Shun(mesh, one);
  CHECK_OK(mesh.Submit(a));
  CHECK_OK(mesh.Submit(b));
  ASSERT_TRUE(mesh.RunUntilEnded({a.request_id, b.request_id}));
  PlainEngine plain(Golden(GetParam()));
  for (const ClientRequest& r : {a, b}) {
    EXPECT_TRUE(SameAnswer(mesh.answer(r.request_id), plain.Run(r))) << r.request_id;
  }
  EXPECT_EQ(Results(mesh, "OK") + Results(mesh, "BUSY"), 2u);
  EXPECT_EQ(Results(mesh, "BUSY"), 1u);
}

}  // namespace
}  // namespace deltamesh::testing
