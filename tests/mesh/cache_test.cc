// Prefix caches in a mesh: what was computed before is restored, moved only where it is missing, and the
// answer keeps the bits of one engine that knows of no cache.
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/mesh/compared.h"
#include "tests/mesh/requests.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {
namespace {

class MeshCacheTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  TestMeshOptions Options() const {
    TestMeshOptions options;
    options.folder = Golden(GetParam());
    options.cache_bytes = int64_t{32} << 20;
    return options;
  }

  // Runs one request to its end and compares it with an engine of its own.
  const Answer& Ask(TestMesh& mesh, const ClientRequest& request) {
    return AskCompared(mesh, Golden(GetParam()), request);
  }
};

INSTANTIATE_TEST_SUITE_P(Families, MeshCacheTest, ::testing::Values("kimi_k3", "kimi_linear"));

TEST_P(MeshCacheTest, TheSamePromptAgainComputesAtMostABlock) {
  TestMesh mesh(Options());
  mesh.Start();
  for (const int64_t tokens : {65, 130, 192, 257, 400}) {
    ClientRequest request =
        MakeRequest(absl::StrFormat("first-%d", tokens), tokens, 9, static_cast<uint64_t>(tokens));
    EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
    request.request_id = absl::StrFormat("again-%d", tokens);
    const Answer& again = Ask(mesh, request);
    EXPECT_EQ(again.usage.cached_tokens, (tokens - 1) / 64 * 64);
    EXPECT_EQ(again.usage.prompt_tokens, tokens);
  }
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
  EXPECT_EQ(mesh.router().counters().handoffs_refused, 0u);
}

// Decode has latents of the first hand-off but no snapshot that serves: the second one moves what is new, and
// the slab.
TEST_P(MeshCacheTest, OnlyMissingBlocksMove) {
  TestMesh mesh(Options());
  mesh.Start();
  ClientRequest request = MakeRequest("one", 330, 5, 2);
  Ask(mesh, request);
  const uint64_t first = mesh.router().counters().handoff_bytes;
  request.request_id = "two";
  for (size_t i = 260; i < 330; ++i) request.prompt[i] ^= 1;
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
  const uint64_t second = mesh.router().counters().handoff_bytes - first;
  const StateLayout layout = SharedModel(Golden(GetParam()), {}).state_layout();
  EXPECT_EQ(first - second, static_cast<uint64_t>(4 * layout.block_bytes()));
}

// The decode worker that holds the end of the last answer computes the next turn itself.
TEST_P(MeshCacheTest, TurnsOfASessionComputeOnlyWhatIsNew) {
  TestMesh mesh(Options());
  mesh.Start();
  ClientRequest request = MakeRequest("turn-0", 100, 30, 4);
  request.cache.set_session(17);
  int64_t computed = 0;  // positions of the turn before
  for (int turn = 1; turn <= 5; ++turn) {
    const Answer answer = Ask(mesh, request);
    EXPECT_EQ(answer.usage.cached_tokens, computed / 64 * 64) << turn;
    computed = static_cast<int64_t>(request.prompt.size() + answer.tokens.size()) - 1;
    request.request_id = absl::StrFormat("turn-%d", turn);
    request.prompt.insert(request.prompt.end(), answer.tokens.begin(), answer.tokens.end());
    const std::vector<TokenId> more =
        MakeRequest("", 40 + turn, 1, 100 + static_cast<uint64_t>(turn)).prompt;
    request.prompt.insert(request.prompt.end(), more.begin(), more.end());
  }
  EXPECT_EQ(mesh.router().counters().handoffs_ok, 1u);
  EXPECT_LE(mesh.cache("decode-0").tree().stats().snapshots, 3);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

// Prompts go where their beginning is, whatever a hash would say.
TEST_P(MeshCacheTest, TheWorkerThatHoldsAPrefixIsChosen) {
  TestMeshOptions options = Options();
  options.prefill = 3;
  options.decode = 3;
  TestMesh mesh(options);
  mesh.Start();
  for (uint64_t i = 0; i < 6; ++i) {
    ClientRequest request = MakeRequest(absl::StrFormat("a%d", i), 260, 4, 2 * i);
    EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
    mesh.RunFor(absl::Milliseconds(300));  // what was kept is told
    for (int again = 0; again < 3; ++again) {
      request.request_id = absl::StrFormat("b%d-%d", i, again);
      EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 256);
    }
  }
  EXPECT_EQ(mesh.router().counters().handoffs_ok, 6u);
}

// Two prompts that share six blocks are computed by two workers. The second one has nothing of the first
// prompt, and keeps a snapshot where they part: the third prompt goes on from there.
TEST_P(MeshCacheTest, WherePromptsPartIsFoundAcrossWorkers) {
  TestMeshOptions options = Options();
  options.prefill = 2;
  options.router.disaggregation = Disaggregation::kAlways;
  TestMesh mesh(options);
  mesh.Start();
  const auto prefill_of = [&](const std::string& id) {
    const Decision& d = *mesh.router().decisions().Find(id, 1).at(0);
    return d.candidates[d.chosen].prefill;
  };
  ClientRequest request = MakeRequest("one", 490, 4, 40);
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
  const std::string first = prefill_of("one");
  mesh.SetLost([&](const std::string& from, mesh::WorkerMessage& message) {
    if (from == first && message.has_heartbeat()) message.mutable_heartbeat()->set_draining(true);
    return false;
  });
  mesh.RunFor(absl::Seconds(2));  // and what was kept is told
  const std::vector<TokenId> shared(request.prompt.begin(), request.prompt.begin() + 384);
  const auto part = [&](const std::string& id, int64_t tokens, uint64_t seed) {
    request = MakeRequest(id, tokens, 4, seed);
    std::copy(shared.begin(), shared.end(), request.prompt.begin());
    const int64_t cached = Ask(mesh, request).usage.cached_tokens;
    EXPECT_NE(prefill_of(id), first);
    mesh.RunFor(absl::Milliseconds(300));
    return cached;
  };
  EXPECT_EQ(part("two", 450, 41), 0);
  EXPECT_EQ(part("three", 470, 42), 384);
  EXPECT_EQ(mesh.router().counters().handoffs_refused, 0u);
}

TEST_P(MeshCacheTest, OtherTenantsAndRequestsWithoutCacheFindNothing) {
  TestMesh mesh(Options());
  mesh.Start();
  ClientRequest request = MakeRequest("a", 200, 4, 6);
  request.cache.set_salt("one");
  Ask(mesh, request);
  request.request_id = "b";
  request.cache.set_salt("two");
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
  request.request_id = "c";
  request.cache.set_salt("one");
  request.cache.set_off(true);
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
  request.request_id = "d";
  request.cache.set_off(false);
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 192);
}

TEST_P(MeshCacheTest, ARestartedWorkerHasForgottenAndAnswersAlike) {
  TestMesh mesh(Options());
  mesh.Start();
  ClientRequest request = MakeRequest("a", 200, 4, 8);
  Ask(mesh, request);
  for (const char* worker : {"prefill-0", "decode-0"}) {
    mesh.Kill(worker);
    mesh.Restart(worker);
  }
  mesh.Start();
  mesh.RunFor(absl::Seconds(1));
  request.request_id = "b";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 0);
  request.request_id = "c";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 192);
}

// What a router missed is noticed at the next message: that worker tells everything anew, and is found again.
TEST_P(MeshCacheTest, ALostWordOfAWorkerIsMadeGood) {
  TestMeshOptions options = Options();
  options.decode = 2;
  options.prefill = 2;
  TestMesh mesh(options);
  mesh.Start();
  ClientRequest request = MakeRequest("before", 200, 4, 10);
  Ask(mesh, request);
  mesh.RunFor(absl::Milliseconds(300));
  EXPECT_EQ(mesh.router().counters().prefix_resyncs, 0u);
  int lost = 0;  // the next word of each worker that has something to tell
  mesh.SetLost([&](const std::string&, const mesh::WorkerMessage& message) {
    lost += message.has_prefixes();
    return message.has_prefixes();
  });
  ClientRequest unheard = MakeRequest("unheard", 260, 4, 12);
  Ask(mesh, unheard);
  mesh.RunFor(absl::Milliseconds(300));
  mesh.SetLost(nullptr);
  ASSERT_GE(lost, 2);
  // Nobody knows that anything is missing, and what was heard before holds.
  EXPECT_EQ(mesh.router().counters().prefix_resyncs, 0u);
  request.request_id = "after";
  EXPECT_EQ(Ask(mesh, request).usage.cached_tokens, 192);
  // The next words do not fit.
  for (uint64_t i = 0; i < 4; ++i)
    Ask(mesh, MakeRequest(absl::StrFormat("more-%d", i), 150, 4, 20 + i));
  mesh.RunFor(absl::Milliseconds(300));
  EXPECT_GE(mesh.router().counters().prefix_resyncs, 2u);
  EXPECT_LE(mesh.router().counters().prefix_resyncs, 4u) << "once for each worker";
  EXPECT_EQ(mesh.router().gauges().prefix_unknown, 0);
  for (ClientRequest* known : {&request, &unheard}) {
    known->request_id += "-again";
    EXPECT_EQ(Ask(mesh, *known).usage.cached_tokens,
              static_cast<int64_t>(known->prompt.size() - 1) / 64 * 64);
    const auto explained = mesh.router().decisions().Find(known->request_id, 1);
    ASSERT_EQ(explained.size(), 1u);
    EXPECT_EQ(explained[0]->snapshot_tokens,
              static_cast<int64_t>(known->prompt.size() - 1) / 64 * 64);
  }
}

// Pools so small that cached latents must make room for running requests.
TEST_P(MeshCacheTest, CachedLatentsMakeRoomForRequests) {
  TestMeshOptions options = Options();
  options.engine.latent_blocks = 12;
  TestMesh mesh(options);
  mesh.Start();
  for (uint64_t i = 0; i < 8; ++i) {
    Ask(mesh, MakeRequest(absl::StrFormat("r%d", i), 300 + static_cast<int64_t>(i) * 20, 4, i));
  }
  EXPECT_GT(mesh.cache("prefill-0").tree().stats().evicted, 0u);
  EXPECT_GT(mesh.cache("decode-0").tree().stats().evicted, 0u);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

// Documents that are asked about from within turn the grid on, prompts that share nothing turn it off again;
// both can be read from outside.
TEST_P(MeshCacheTest, TheGridIsSeen) {
  TestMeshOptions options = Options();
  options.learning = {.grid_blocks = 1, .memory_prompts = 2, .blocks_asked_min = 8};
  options.router.disaggregation = Disaggregation::kNever;
  TestMesh mesh(options);
  mesh.Start();
  const auto sample = [&](const std::string& name, const std::string& to = "") {
    return Sample(mesh.decode("decode-0").Metrics(), name, to);
  };
  EXPECT_EQ(sample("prefix_grid_tokens"), 0);
  for (uint64_t i = 0; i < 4; ++i) {
    ClientRequest request = MakeRequest(absl::StrFormat("about-%d", i), 330, 2, 2);
    for (size_t at = 200; at < 330; ++at) request.prompt[at] ^= static_cast<TokenId>(i);
    Ask(mesh, request);
  }
  EXPECT_EQ(sample("prefix_grid_tokens"), 64);
  EXPECT_EQ(sample("prefix_grid_switches_total", "on"), 1);
  EXPECT_EQ(sample("prefix_grid_switches_total", "off"), 0);
  for (uint64_t i = 0; i < 12; ++i) {
    Ask(mesh, MakeRequest(absl::StrFormat("other-%d", i), 330, 2, 10 + i));
  }
  EXPECT_EQ(sample("prefix_grid_tokens"), 0);
  EXPECT_EQ(sample("prefix_grid_switches_total", "off"), 1);
}

}  // namespace
}  // namespace deltamesh::testing
