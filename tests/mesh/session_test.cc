// Sessions in a mesh: turns that are appended and forks have the bits of one engine that is given the whole
// conversation.
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/mesh/requests.h"
#include "tests/mesh/test_mesh.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh::testing {
namespace {

class MeshSessionTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  TestMeshOptions Options() const {
    TestMeshOptions options;
    options.folder = Golden(GetParam());
    options.cache_bytes = int64_t{32} << 20;
    return options;
  }

  static SessionState Ask(TestMesh& mesh, const SessionCall& call) {
    const SessionAnswered answer = mesh.CallSession(call);
    CHECK_OK(answer.status);
    return answer.state;
  }

  // Appends `tokens` new ones drawn from the seed (a new session: begins with them) and compares with an
  // engine of its own. Odd seeds sample.
  Answer Turn(TestMesh& mesh, const std::string& session, int64_t tokens, int64_t answer,
              uint64_t seed, bool begin = false) {
    ClientRequest request = MakeRequest(absl::StrFormat("turn %d", next_++), tokens, answer, seed);
    request.session = MakeSessionId("", session);
    request.cache.set_session(SessionNumber(request.session));
    if (!begin) {
      const SessionState open = Ask(mesh, MakeSessionCall(SessionCall::Kind::kOpen, session));
      request.prompt.insert(request.prompt.begin(), open.tokens->begin(), open.tokens->end());
    }
    CHECK_OK(mesh.Submit(request));
    EXPECT_TRUE(mesh.RunUntilEnded({request.request_id}));
    const Answer got = mesh.answer(request.request_id);
    PlainEngine plain(Golden(GetParam()));
    const Answer expected = plain.Run(request);
    EXPECT_TRUE(SameAnswer(got, expected)) << request.request_id << "\n  mesh  " << Describe(got)
                                           << "\n  plain " << Describe(expected);
    const SessionState now = Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, session));
    EXPECT_EQ(now.tokens->size(), request.prompt.size() + got.tokens.size());
    return got;
  }

  TestFolder folder_;
  int next_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Families, MeshSessionTest, ::testing::Values("kimi_k3", "kimi_linear"));

TEST_P(MeshSessionTest, AppendedTurnsComputeOnlyWhatIsNew) {
  TestMesh mesh(Options());
  mesh.Start();
  Turn(mesh, "s", 100, 30, 3, /*begin=*/true);
  int64_t held = 128;  // whole blocks of what was computed
  for (uint64_t turn = 1; turn <= 4; ++turn) {
    const Answer answer = Turn(mesh, "s", 40, 7, 3 + turn);
    EXPECT_EQ(answer.usage.cached_tokens, held) << turn;
    const SessionState state = Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, "s"));
    held = (static_cast<int64_t>(state.tokens->size()) - 1) / 64 * 64;
    EXPECT_EQ(state.position, held);
    ASSERT_FALSE(state.holders.empty());
    EXPECT_EQ(state.holders[0].worker, "decode-0");
  }
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

TEST_P(MeshSessionTest, ForksShareWhatIsHeldAndGoTheirOwnWays) {
  TestMesh mesh(Options());
  mesh.Start();
  Turn(mesh, "s", 150, 30, 5, /*begin=*/true);
  const int64_t blocks = mesh.cache("decode-0").tree().stats().blocks;
  const SessionState fork = Ask(mesh, MakeSessionCall(SessionCall::Kind::kFork, "s", "t"));
  EXPECT_EQ(fork.tokens->size(), 180u);
  EXPECT_EQ(mesh.cache("decode-0").tree().stats().blocks, blocks);  // nothing was copied
  const Answer a = Turn(mesh, "s", 20, 9, 7);
  const Answer b = Turn(mesh, "t", 21, 9, 8);
  EXPECT_EQ(a.usage.cached_tokens, 128);
  EXPECT_EQ(b.usage.cached_tokens, 128);
  EXPECT_EQ(mesh.CallSession(MakeSessionCall(SessionCall::Kind::kFork, "s", "t")).status.code(),
            absl::StatusCode::kAlreadyExists);
  Turn(mesh, "t", 70, 9, 9);
  Turn(mesh, "s", 71, 9, 10);
}

// For every tail length mod 64 that matters, with another sequence in the batch, on another worker, after
// everything else was lost.
TEST_P(MeshSessionTest, SuspendedAndResumedElsewhereItHasTheSameBits) {
  TestMeshOptions options = Options();
  options.store_folder = folder_.path;
  options.decode = 2;
  TestMesh mesh(options);
  mesh.Start();
  uint64_t seed = 21;
  for (const int64_t prompt : {20, 100, 127, 128, 129, 191}) {
    const std::string name = absl::StrFormat("s%d", prompt);
    Turn(mesh, name, prompt, 22, seed++, /*begin=*/true);
    mesh.RunFor(absl::Milliseconds(300));  // what was kept is told
    const SessionState before = Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, name));
    const SessionState rest = Ask(mesh, MakeSessionCall(SessionCall::Kind::kSuspend, name));
    EXPECT_EQ(rest.position, before.position);
    EXPECT_EQ(rest.position, static_cast<int64_t>(before.tokens->size() - 1) / 64 * 64);
    EXPECT_EQ(mesh.router().gauges().sessions, 0);
    EXPECT_TRUE(Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, name)).suspended);
    for (const char* worker : {"prefill-0", "decode-0", "decode-1"}) mesh.Kill(worker);
    mesh.RestartRouter();
    for (const char* worker : {"prefill-0", "decode-0", "decode-1"}) mesh.Restart(worker);
    mesh.Start();
    ClientRequest other = MakeRequest(name + " other", 70, 60, seed++);
    CHECK_OK(mesh.Submit(other));
    if (prompt % 2 == 0) {  // else by itself
      const SessionState back = Ask(mesh, MakeSessionCall(SessionCall::Kind::kResume, name));
      EXPECT_EQ(back.position, rest.position);
      EXPECT_EQ(*back.tokens, *before.tokens);
      mesh.RunFor(absl::Milliseconds(300));
    }
    const Answer answer = Turn(mesh, name, 30, 9, seed++);
    EXPECT_EQ(answer.usage.cached_tokens, rest.position) << prompt;
    EXPECT_TRUE(mesh.RunUntilEnded({other.request_id}));
    Ask(mesh, MakeSessionCall(SessionCall::Kind::kSuspend, name));
    const SessionState fork =
        Ask(mesh, MakeSessionCall(SessionCall::Kind::kFork, name, name + "'"));
    EXPECT_GT(fork.tokens->size(), before.tokens->size());
    Turn(mesh, name + "'", 10, 5, seed++);
    EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
    mesh.RestartRouter();
    mesh.Start();
  }
}

// A name that was suspended is begun anew, and forgotten for another session: the conversation that comes
// back is the new one, from every worker, after the router ended too.
TEST_P(MeshSessionTest, ANameBegunAnewNeverFallsBack) {
  TestMeshOptions options = Options();
  options.store_folder = folder_.path;
  options.router.sessions_max = 1;
  TestMesh mesh(options);
  mesh.Start();
  Turn(mesh, "s", 150, 20, 3, /*begin=*/true);
  mesh.RunFor(absl::Milliseconds(300));
  Ask(mesh, MakeSessionCall(SessionCall::Kind::kSuspend, "s"));
  Turn(mesh, "s", 40, 9, 5, /*begin=*/true);
  const SessionState fresh = Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, "s"));
  EXPECT_FALSE(fresh.suspended);
  mesh.RunFor(absl::Milliseconds(300));
  EXPECT_EQ(mesh.router().gauges().sessions_unsettled, 0);
  Turn(mesh, "other", 30, 5, 7, /*begin=*/true);
  const SessionState rest = Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, "s"));
  EXPECT_TRUE(rest.suspended);
  EXPECT_EQ(*rest.tokens, *fresh.tokens);
  mesh.RestartRouter();
  mesh.Start();
  EXPECT_EQ(*Ask(mesh, MakeSessionCall(SessionCall::Kind::kResume, "s")).tokens, *fresh.tokens);
  Turn(mesh, "s", 20, 9, 9);
  // Forgotten at once, before any store could say what it has.
  Ask(mesh, MakeSessionCall(SessionCall::Kind::kSuspend, "s"));
  Turn(mesh, "s", 50, 9, 11, /*begin=*/true);
  const SessionState newest = Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, "s"));
  EXPECT_EQ(newest.tokens->size(), 59u);
  Turn(mesh, "other", 31, 5, 13, /*begin=*/true);
  EXPECT_EQ(*Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, "s")).tokens, *newest.tokens);
}

// An answer that the router cuts, because a stop string is complete or its client left, is continued from
// where it stood as well.
TEST_P(MeshSessionTest, ACutAnswersEndIsKept) {
  TestMesh mesh(Options());
  mesh.Start();
  ClientRequest request = MakeRequest("cut", 100, 120, 4);
  request.session = MakeSessionId("", "s");
  request.cache.set_session(SessionNumber(request.session));
  CHECK_OK(mesh.Submit(request));
  ASSERT_TRUE(mesh.RunUntil([&] { return mesh.answer("cut").tokens.size() >= 40; }));
  ASSERT_TRUE(mesh.router().CompleteClient("cut", 40, mesh.now()));
  mesh.RunFor(absl::Milliseconds(300));
  const Answer next = Turn(mesh, "s", 20, 9, 5);
  EXPECT_EQ(next.usage.cached_tokens, 128);  // 64 without it: the prompt's tail
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

TEST_P(MeshSessionTest, AWorkerLostWhileItSuspendsEndsTheCallAndNotTheSession) {
  TestMeshOptions options = Options();
  options.store_folder = folder_.path;
  TestMesh mesh(options);
  mesh.Start();
  Turn(mesh, "s", 100, 20, 3, /*begin=*/true);
  mesh.RunFor(absl::Milliseconds(300));
  SessionCall call = MakeSessionCall(SessionCall::Kind::kSuspend, "s");
  call.id = "by hand";
  mesh.router().CallSession(call, mesh.now());
  mesh.Kill("decode-0");
  mesh.Restart("decode-0");
  mesh.Start();
  mesh.RunFor(absl::Seconds(1));
  EXPECT_EQ(mesh.router().gauges().session_calls, 0);
  EXPECT_EQ(mesh.router().counters().sessions.refused[static_cast<size_t>(SessionRefusal::kLost)],
            1u);
  Turn(mesh, "s", 20, 9, 5);
}

TEST_P(MeshSessionTest, ALostWorkerCostsTimeAndNoSession) {
  TestMesh mesh(Options());
  mesh.Start();
  Turn(mesh, "s", 150, 20, 11, /*begin=*/true);
  mesh.Kill("decode-0");
  mesh.Restart("decode-0");
  mesh.Start();
  mesh.RunFor(absl::Seconds(1));
  EXPECT_TRUE(Ask(mesh, MakeSessionCall(SessionCall::Kind::kGet, "s")).tokens->size() == 170u);
  Turn(mesh, "s", 20, 9, 13);
}

}  // namespace
}  // namespace deltamesh::testing
