// The reverse of a hand-off: who is to compute a prompt fetches the state that another worker holds, computes
// the rest, and the answer keeps the bits of one engine that knows of no other.
#include "absl/container/flat_hash_set.h"
#include "tests/mesh/fetch_fixture.h"

namespace deltamesh::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Families, MeshFetchTest, ::testing::Values("kimi_k3", "kimi_linear"));

// For tails of many lengths, with other sequences in both workers' batches.
TEST_P(MeshFetchTest, ADecodeWorkerGoesOnFromWhatAnotherHolds) {
  TestMeshOptions options = Options();
  // Others stream there, and a prefill worker would spare them what is left to compute.
  options.router.disaggregation = Disaggregation::kNever;
  TestMesh mesh(options);
  mesh.Start();
  PlainEngine plain(Golden(GetParam()));
  int turns = 0;
  for (const int64_t tail : {1, 15, 16, 58, 63, 64, 65, 100}) {
    std::string holder;
    const uint64_t seed = 30 + static_cast<uint64_t>(turns);
    const ClientRequest turn = NextTurn(mesh, absl::StrFormat("s%d", turns), tail, seed, &holder);
    Shun(mesh, holder);
    std::vector<ClientRequest> others;
    for (uint64_t i = 0; i < 2; ++i) {
      others.push_back(MakeRequest(absl::StrFormat("other-%d-%d", turns, i),
                                   70 + static_cast<int64_t>(i) * 30, 30, 200 + seed * 2 + i));
      CHECK_OK(mesh.Submit(others.back()));
    }
    mesh.RunFor(absl::Milliseconds(30));
    const Answer& answer = AskCompared(mesh, Golden(GetParam()), turn);
    EXPECT_EQ(answer.usage.cached_tokens, kHeld) << tail;
    for (const ClientRequest& other : others) {
      ASSERT_TRUE(mesh.RunUntilEnded({other.request_id}));
      EXPECT_TRUE(SameAnswer(mesh.answer(other.request_id), plain.Run(other))) << tail;
    }
    const Decision& d = Explained(mesh, turn.request_id);
    EXPECT_EQ(d.candidates[d.chosen].fetch_from, holder);
    EXPECT_EQ(d.candidates[d.chosen].fetch_tokens, kHeld);
    EXPECT_EQ(d.candidates[d.chosen].decode, Other(holder));
    EXPECT_EQ(d.fetched_from, holder);
    EXPECT_EQ(d.fetched_tokens, kHeld);
    EXPECT_EQ(d.fetched_bytes, d.candidates[d.chosen].fetch_bytes) << "as was planned";
    EXPECT_EQ(d.fetch_refusal, "");
    Welcome(mesh, holder);
    ++turns;
  }
  EXPECT_EQ(Results(mesh, "OK"), static_cast<uint64_t>(turns));
  EXPECT_EQ(mesh.router().counters().fetched_tokens, static_cast<uint64_t>(turns * kHeld));
  EXPECT_EQ(mesh.router().counters().placed_fetch, static_cast<uint64_t>(turns));
  const double in = Sample(mesh.decode("decode-0").Metrics(), "fetches_total", "OK") +
                    Sample(mesh.decode("decode-1").Metrics(), "fetches_total", "OK");
  const double out = Sample(mesh.decode("decode-0").Metrics(), "fetches_served_total", "OK") +
                     Sample(mesh.decode("decode-1").Metrics(), "fetches_served_total", "OK");
  EXPECT_EQ(in, turns);
  EXPECT_EQ(out, turns);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

// A prefill worker that computes faster brings the session's state over, computes what is new and hands the
// result back: only what is new moves then.
TEST_P(MeshFetchTest, APrefillWorkerFetchesWhatDecodeHolds) {
  TestMeshOptions options = Options();
  options.decode = 1;
  TestMesh mesh(options);
  mesh.Start();
  int turns = 0;
  for (const int64_t tail : {100, 122, 127, 186}) {
    std::string holder;
    const ClientRequest turn = NextTurn(mesh, absl::StrFormat("s%d", turns), tail,
                                        50 + static_cast<uint64_t>(turns), &holder);
    Pretend(mesh, "decode-0", [](mesh::Heartbeat& b) { b.set_prompt_tokens_per_second(100); });
    Pretend(mesh, "prefill-0", [](mesh::Heartbeat& b) { b.set_prompt_tokens_per_second(5000); });
    const uint64_t handed = mesh.router().counters().handoff_bytes;
    const Answer& answer = AskCompared(mesh, Golden(GetParam()), turn);
    EXPECT_EQ(answer.usage.cached_tokens, kHeld) << tail;
    const Decision& d = Explained(mesh, turn.request_id);
    EXPECT_EQ(d.candidates[d.chosen].prefill, "prefill-0");
    EXPECT_EQ(d.candidates[d.chosen].fetch_from, "decode-0");
    EXPECT_EQ(d.fetched_tokens, kHeld);
    // Prefill has the latents of the first prompt's whole blocks; decode those of the answer too.
    EXPECT_EQ(d.fetched_bytes,
              layout().snapshot_bytes() + (kHeld - kFirst / 64 * 64) / 64 * layout().block_bytes());
    const int64_t position = (static_cast<int64_t>(turn.prompt.size()) - 1) / 64 * 64;
    EXPECT_EQ(static_cast<int64_t>(mesh.router().counters().handoff_bytes - handed),
              layout().snapshot_bytes() + (position - kHeld) / 64 * layout().block_bytes());
    ++turns;
  }
  EXPECT_EQ(Sample(mesh.prefill("prefill-0").Metrics(), "fetches_total", "OK"), turns);
  EXPECT_EQ(Sample(mesh.decode("decode-0").Metrics(), "fetches_served_total", "OK"), turns);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

// Latents that the fetching worker has already stay where they are.
TEST_P(MeshFetchTest, OnlyMissingBlocksMove) {
  TestMesh mesh(Options());
  mesh.Start();
  std::string holder;
  const ClientRequest turn = NextTurn(mesh, "s", 40, 61, &holder);
  Shun(mesh, holder);
  // The first turn's prompt again: its latents arrive at the other worker, with a snapshot at their end.
  ClientRequest first = MakeRequest("first", kFirst, 4, 61);
  AskCompared(mesh, Golden(GetParam()), first);
  mesh.RunFor(absl::Milliseconds(300));
  AskCompared(mesh, Golden(GetParam()), turn);
  const Decision& d = Explained(mesh, turn.request_id);
  EXPECT_EQ(d.fetched_tokens, kHeld);
  EXPECT_EQ(d.fetched_bytes,
            layout().snapshot_bytes() + (kHeld - kFirst / 64 * 64) / 64 * layout().block_bytes());
}

// The engine's steps wait for a part of it only, never for all.
TEST_P(MeshFetchTest, AStateLeavesInPieces) {
  TestMeshOptions options = Options();
  options.fetch.bytes_per_step = 1;
  TestMesh mesh(options);
  mesh.Start();
  std::string holder;
  const ClientRequest turn = NextTurn(mesh, "s", 40, 67, &holder);
  Shun(mesh, holder);
  absl::flat_hash_set<absl::Time> rounds;  // in which something was sent
  mesh.network().SetFault([&](const InprocMessage& m) {
    if (m.type == MessageType::kHandoffSegment) rounds.insert(mesh.now());
    return InprocFault();
  });
  EXPECT_EQ(AskCompared(mesh, Golden(GetParam()), turn).usage.cached_tokens, kHeld);
  EXPECT_EQ(Results(mesh, "OK"), 1u);
  EXPECT_GE(static_cast<int64_t>(rounds.size()), kHeld / 64 + layout().kda_layers - 1);
}

// Where computing is quicker than bringing, nothing is brought.
TEST_P(MeshFetchTest, ASlowLinkIsNotUsed) {
  TestMesh mesh(Options());
  mesh.Start();
  std::string holder;
  const ClientRequest turn = NextTurn(mesh, "s", 40, 63, &holder);
  for (const char* worker : {"decode-0", "decode-1", "prefill-0"}) {
    Pretend(mesh, worker, [worker, holder](mesh::Heartbeat& b) {
      b.set_prompt_tokens_per_second(1e9);
      b.set_draining(worker == holder);
    });
  }
  const Answer& answer = AskCompared(mesh, Golden(GetParam()), turn);
  EXPECT_EQ(answer.usage.cached_tokens, kFirst / 64 * 64) << "what the prefill worker has";
  EXPECT_EQ(mesh.router().counters().fetch_results.size(), 0u);
}

// What is fetched is kept: the turn after it finds it in memory.
TEST_P(MeshFetchTest, TheNextTurnFindsItHere) {
  TestMesh mesh(Options());
  mesh.Start();
  std::string holder;
  ClientRequest turn = NextTurn(mesh, "s", 30, 65, &holder);
  Shun(mesh, holder);
  AskCompared(mesh, Golden(GetParam()), turn);
  mesh.RunFor(absl::Milliseconds(300));
  turn.request_id = "again";
  EXPECT_GE(AskCompared(mesh, Golden(GetParam()), turn).usage.cached_tokens, kHeld);
  EXPECT_EQ(Results(mesh, "OK"), 1u);
}

}  // namespace
}  // namespace deltamesh::testing
