// How much of a prompt was restored is told truly, however late the prefill worker's own words reach the
// router: they come over another link than the answer.
#include "tests/mesh/fetch_fixture.h"

namespace deltamesh::testing {
namespace {

class MeshCachedTokensTest : public MeshFetchTest {
 protected:
  static constexpr int64_t kShared = 256;

  TestMeshOptions Options() const {
    TestMeshOptions options = MeshFetchTest::Options();
    options.decode = 1;
    options.router.disaggregation = Disaggregation::kAlways;
    return options;
  }
  // Prompts that begin alike, and an answer of one token, so that nothing but the state is waited for.
  static ClientRequest Request(const std::string& id, int64_t tail, uint64_t seed) {
    ClientRequest request = MakeRequest(id, kShared, 1, 90);
    const std::vector<TokenId> more = MakeRequest("", tail, 1, seed).prompt;
    request.prompt.insert(request.prompt.end(), more.begin(), more.end());
    return request;
  }
  // The usage, the decision and the counter, before and after the prefill worker is heard.
  void ExpectCached(TestMesh& mesh, const ClientRequest& request, int64_t cached) {
    const auto told = [&mesh] { return mesh.router().counters().cached_tokens; };
    const uint64_t before = told();
    mesh.SetSlow("prefill-0", true);
    EXPECT_EQ(AskCompared(mesh, Golden(GetParam()), request).usage.cached_tokens, cached)
        << request.request_id;
    mesh.SetSlow("prefill-0", false);
    mesh.RunFor(absl::Milliseconds(300));
    EXPECT_EQ(Explained(mesh, request.request_id).restored_tokens, cached) << request.request_id;
    EXPECT_EQ(told() - before, static_cast<uint64_t>(cached)) << request.request_id;
    EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
  }
};

INSTANTIATE_TEST_SUITE_P(Families, MeshCachedTokensTest,
                         ::testing::Values("kimi_k3", "kimi_linear"));

TEST_P(MeshCachedTokensTest, OfAStateThatIsHandedOver) {
  TestMesh mesh(Options());
  mesh.Start();
  ExpectCached(mesh, Request("first", 9, 1), 0);
  for (const int64_t tail : {9, 64, 65, 150}) {
    ExpectCached(mesh, Request(absl::StrFormat("part-%d", tail), tail, static_cast<uint64_t>(tail)),
                 kShared);
  }
  ExpectCached(mesh, Request("whole", 150, 150), kShared + 128);
  EXPECT_EQ(mesh.router().counters().handoffs_ok, 6u);
}

TEST_P(MeshCachedTokensTest, OfAStateThatThePrefillWorkerFetches) {
  TestMeshOptions options = Options();
  options.router.disaggregation = MeshFetchTest::Options().router.disaggregation;
  TestMesh mesh(options);
  mesh.Start();
  std::string holder;
  const ClientRequest turn = NextTurn(mesh, "s", 122, 51, &holder);
  Pretend(mesh, "decode-0", [](mesh::Heartbeat& b) { b.set_prompt_tokens_per_second(100); });
  Pretend(mesh, "prefill-0", [](mesh::Heartbeat& b) { b.set_prompt_tokens_per_second(5000); });
  ExpectCached(mesh, turn, kHeld);
  EXPECT_EQ(mesh.router().counters().fetched_tokens, static_cast<uint64_t>(kHeld));
}

// What counts is what was restored for the try that the answer comes from.
TEST_P(MeshCachedTokensTest, OfARefusedTryNothingCounts) {
  TestMesh mesh(Options());
  mesh.Start();
  ExpectCached(mesh, Request("first", 9, 1), 0);
  int seals = 0;
  mesh.SetRewrite([&](MessageType type, std::string& header, std::string&) {
    if (type != MessageType::kHandoffSeal || seals++ > 0) return false;
    mesh::Seal seal;
    CHECK(seal.ParseFromString(header));
    EXPECT_EQ(seal.restored_tokens(), static_cast<uint64_t>(kShared));
    seal.set_region_crc32c(0, seal.region_crc32c(0) ^ 1);
    header = seal.SerializeAsString();
    mesh.cache("prefill-0").Clear();  // the next try finds nothing
    return true;
  });
  ExpectCached(mesh, Request("again", 150, 2), 0);
  EXPECT_EQ(seals, 2);
  EXPECT_EQ(mesh.router().counters().handoffs_refused, 1u);
  ExpectCached(mesh, Request("third", 150, 2), kShared + 128);
}

}  // namespace
}  // namespace deltamesh::testing
