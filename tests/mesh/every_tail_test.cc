// The exactness law for states that were moved, fetched, forked, or suspended and resumed: whatever the
// tail's length on the block grid, and with a stranger in the batch, an answer has the bits of a cold run
// alone.
#include <utility>

#include "tests/mesh/fetch_fixture.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh::testing {
namespace {

constexpr int64_t kTails = 64;

// One request that nobody waits for, in the batch of whatever else is there: as long as it runs, and a new
// one after it. Each is compared when it ended.
class Stranger {
 public:
  Stranger(TestMesh* mesh, std::string folder) : mesh_(mesh), folder_(std::move(folder)) {}
  ~Stranger() { End(); }

  // One generates, and will for a while.
  void Joins() {
    if (request_ && tokens() < kTokens - kReserve) return;
    End();
    request_ = MakeRequest(absl::StrFormat("stranger-%d", count_), 40, kTokens, 900 + count_);
    ++count_;
    request_->cache.set_off(true);
    CHECK_OK(mesh_->Submit(*request_));
    ASSERT_TRUE(mesh_->RunUntil([this] { return tokens() > 0; }));
    mesh_->RunFor(absl::Milliseconds(300));  // that its prompt does not wait any more is told
  }
  void ExpectStillThere() const {
    EXPECT_GT(tokens(), 0);
    EXPECT_FALSE(mesh_->answer(request_->request_id).ended) << "it left before the others";
  }

 private:
  static constexpr int64_t kTokens = 450, kReserve = 150;

  int64_t tokens() const {
    return static_cast<int64_t>(mesh_->answer(request_->request_id).tokens.size());
  }
  void End() {
    if (!request_) return;
    EXPECT_TRUE(mesh_->RunUntilEnded({request_->request_id}));
    PlainEngine plain(folder_);
    EXPECT_TRUE(SameAnswer(mesh_->answer(request_->request_id), plain.Run(*request_)))
        << request_->request_id;
    request_.reset();
  }

  TestMesh* const mesh_;
  const std::string folder_;
  uint64_t count_ = 0;
  std::optional<ClientRequest> request_;
};

class EveryTailTest : public MeshFetchTest {
 protected:
  void SetUp() override {
    MeshFetchTest::SetUp();
    plain_ = std::make_unique<PlainEngine>(Golden(GetParam()));
  }
  // `head` and a tail of its own.
  static ClientRequest Request(const std::string& id, const std::vector<TokenId>& head,
                               int64_t tail) {
    ClientRequest request = MakeRequest(id, tail, 3, 300 + static_cast<uint64_t>(tail));
    request.prompt.insert(request.prompt.begin(), head.begin(), head.end());
    return request;
  }
  void ExpectAsAlone(TestMesh& mesh, const ClientRequest& request) {
    const Answer& answer = mesh.answer(request.request_id);
    const Answer expected = plain_->Run(request);
    ASSERT_EQ(expected.scores.size(), static_cast<size_t>(request.max_tokens));
    EXPECT_TRUE(SameAnswer(answer, expected))
        << request.prompt.size() << " tokens\n  mesh  " << Describe(answer) << "\n  plain "
        << Describe(expected);
  }
  // With the stranger in the batch from before it begins until it has ended.
  const Answer& Ask(TestMesh& mesh, Stranger& stranger, const ClientRequest& request) {
    stranger.Joins();
    CHECK_OK(mesh.Submit(request));
    EXPECT_TRUE(mesh.RunUntilEnded({request.request_id}));
    stranger.ExpectStillThere();
    ExpectAsAlone(mesh, request);
    return mesh.answer(request.request_id);
  }

  static SessionState Call(TestMesh& mesh, SessionCall::Kind kind, const std::string& name,
                           const std::string& target = "") {
    const SessionAnswered answer = mesh.CallSession(MakeSessionCall(kind, name, target));
    CHECK_OK(answer.status);
    return answer.state;
  }
  // A session's next turn: `tail` tokens more than `head`, which are all it has.
  static ClientRequest Turn(const std::string& session, const std::vector<TokenId>& head,
                            int64_t tail) {
    ClientRequest turn = Request(absl::StrFormat("%s+%d", session, tail), head, tail);
    turn.session = MakeSessionId("", session);
    turn.cache.set_session(SessionNumber(turn.session));
    return turn;
  }

  std::unique_ptr<PlainEngine> plain_;
  TestFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Families, EveryTailTest, ::testing::Values("kimi_k3", "kimi_linear"));

// All at once: both workers' batches are full of others too.
TEST_P(EveryTailTest, HandedOver) {
  TestMeshOptions options = Options();
  options.decode = 1;
  options.cache_bytes = 0;
  options.router.disaggregation = Disaggregation::kAlways;
  TestMesh mesh(options);
  mesh.Start();
  Stranger stranger(&mesh, options.folder);
  stranger.Joins();
  std::vector<ClientRequest> requests;
  std::vector<RequestId> ids;
  for (int64_t tail = 1; tail <= kTails; ++tail) {
    const auto head = MakeRequest("", 128, 1, static_cast<uint64_t>(tail)).prompt;
    requests.push_back(Request(absl::StrFormat("r%d", tail), head, tail));
    ids.push_back(requests.back().request_id);
    CHECK_OK(mesh.Submit(requests.back()));
  }
  ASSERT_TRUE(mesh.RunUntilEnded(ids));
  stranger.ExpectStillThere();
  for (const ClientRequest& request : requests) ExpectAsAlone(mesh, request);
  EXPECT_EQ(mesh.router().counters().handoffs_ok, static_cast<uint64_t>(kTails));
}

// The worker that fetches forgets it before the next one.
TEST_P(EveryTailTest, FetchedByADecodeWorker) {
  TestMeshOptions options = Options();
  options.router.disaggregation = Disaggregation::kNever;
  TestMesh mesh(options);
  mesh.Start();
  std::string holder;
  std::vector<TokenId> head = NextTurn(mesh, "s", 1, 30, &holder).prompt;
  head.resize(kHeld);
  Shun(mesh, holder);
  Stranger stranger(&mesh, options.folder);
  for (int64_t tail = 1; tail <= kTails; ++tail) {
    mesh.cache(Other(holder)).Clear();
    mesh.RunFor(absl::Milliseconds(20));  // what it forgot is told
    const ClientRequest request = Request(absl::StrFormat("r%d", tail), head, tail);
    EXPECT_EQ(Ask(mesh, stranger, request).usage.cached_tokens, kHeld);
    EXPECT_EQ(Explained(mesh, request.request_id).fetched_tokens, kHeld);
  }
  EXPECT_EQ(Results(mesh, "OK"), static_cast<uint64_t>(kTails));
}

// It computes a block on top of it, and hands that over.
TEST_P(EveryTailTest, FetchedByAPrefillWorkerAndHandedOver) {
  TestMeshOptions options = Options();
  options.decode = 1;
  TestMesh mesh(options);
  mesh.Start();
  std::string holder;
  std::vector<TokenId> head = NextTurn(mesh, "s", 1, 30, &holder).prompt;
  head.resize(kHeld);
  // The prefill worker is faster, but not so fast that to compute all were as quick as to fetch.
  Pretend(mesh, "decode-0", [](mesh::Heartbeat& b) { b.set_prompt_tokens_per_second(50); });
  Stranger stranger(&mesh, options.folder);
  for (int64_t tail = 65; tail <= 64 + kTails; ++tail) {
    mesh.cache("prefill-0").Clear();
    mesh.RunFor(absl::Milliseconds(20));
    const ClientRequest request = Request(absl::StrFormat("r%d", tail), head, tail);
    EXPECT_EQ(Ask(mesh, stranger, request).usage.cached_tokens, kHeld);
    const Decision& d = Explained(mesh, request.request_id);
    EXPECT_EQ(d.fetched_tokens, kHeld)
        << tail << ": a snapshot at " << d.snapshot_tokens << " of " << d.latent_tokens << ", "
        << d.candidates[d.chosen].fetch_from << " " << d.fetch_refusal;
  }
  EXPECT_EQ(Results(mesh, "OK"), static_cast<uint64_t>(kTails));
}

TEST_P(EveryTailTest, Forked) {
  TestMeshOptions options = Options();
  options.decode = 1;
  options.router.disaggregation = Disaggregation::kNever;
  TestMesh mesh(options);
  mesh.Start();
  Stranger stranger(&mesh, options.folder);
  ClientRequest first = Turn("s", {}, 150);
  first.max_tokens = 20;
  Ask(mesh, stranger, first);
  for (int64_t more = 1; more <= kTails; ++more) {
    const std::string fork = absl::StrFormat("fork-%d", more);
    const SessionState state = Call(mesh, SessionCall::Kind::kFork, "s", fork);
    EXPECT_EQ(state.tokens->size(), 170u);
    EXPECT_EQ(Ask(mesh, stranger, Turn(fork, *state.tokens, more)).usage.cached_tokens, 128);
  }
}

// Every process ends in between, and one of the two decode workers does not come back.
TEST_P(EveryTailTest, SuspendedAndResumed) {
  TestMeshOptions options = Options();
  options.store_folder = folder_.path;
  options.router.disaggregation = Disaggregation::kNever;
  TestMesh mesh(options);
  mesh.Start();
  const auto name = [](int64_t i) { return absl::StrFormat("s%d", i); };
  std::vector<std::vector<TokenId>> said;
  for (int64_t i = 0; i < kTails; ++i) {
    const ClientRequest first = Turn(name(i), {}, 129 + i);
    CHECK_OK(mesh.Submit(first));
    ASSERT_TRUE(mesh.RunUntilEnded({first.request_id}));
    ExpectAsAlone(mesh, first);
    mesh.RunFor(absl::Milliseconds(20));  // what was kept is told
    const SessionState rest = Call(mesh, SessionCall::Kind::kSuspend, name(i));
    said.push_back(*rest.tokens);
    EXPECT_EQ(rest.position, static_cast<int64_t>(said.back().size() - 1) / 64 * 64);
  }
  for (const char* worker : {"prefill-0", "decode-0", "decode-1"}) mesh.Kill(worker);
  mesh.RestartRouter();
  for (const char* worker : {"prefill-0", "decode-1"}) mesh.Restart(worker);
  ASSERT_TRUE(mesh.RunUntil([&] { return mesh.router().Ready().ok(); }));
  mesh.RunFor(absl::Seconds(1));
  Stranger stranger(&mesh, options.folder);
  for (int64_t i = 0; i < kTails; ++i) {
    const auto& tokens = said[static_cast<size_t>(i)];
    if (i % 2 == 0) {  // else by itself
      EXPECT_EQ(*Call(mesh, SessionCall::Kind::kResume, name(i)).tokens, tokens);
    } else {
      EXPECT_EQ(*Call(mesh, SessionCall::Kind::kOpen, name(i)).tokens, tokens);
    }
    EXPECT_EQ(Ask(mesh, stranger, Turn(name(i), tokens, 5)).usage.cached_tokens,
              static_cast<int64_t>(tokens.size() - 1) / 64 * 64);
  }
}

}  // namespace
}  // namespace deltamesh::testing
