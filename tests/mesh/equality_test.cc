// The exactness law across processes: a mesh answers with the bits of one engine, whatever the number of
// expert shards, the prompt's length on the tile and block grids, and what else runs.
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/mesh/requests.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {
namespace {

// Around tiles (16), blocks (64), the chunk limit (80) and several blocks.
const std::vector<int64_t> kLengths = {1,  2,  15, 16,  17,  63,  64,  65,  66,  79, 80,
                                       81, 96, 97, 127, 128, 129, 130, 192, 193, 257};

struct Case {
  const char* family;
  int shards;
  int threads = 1;
  WeightWidth weights = WeightWidth::kStored;
  Activations activations = Activations::kFloat;

  LoadOptions load() const {
    LoadOptions options;
    options.weights = weights;
    options.activations = activations;
    return options;
  }
};

class MeshEqualityTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }
};

TEST_P(MeshEqualityTest, EveryLengthAllAtOnce) {
  TestMeshOptions options;
  options.folder = Golden(GetParam().family);
  options.load = GetParam().load();
  options.shards = GetParam().shards;
  options.threads = GetParam().threads;
  options.prefill = 2;
  options.decode = 2;
  options.seed = static_cast<uint64_t>(GetParam().shards);
  TestMesh mesh(options);
  mesh.Start();

  PlainEngine plain(options.folder, options.load);
  std::vector<ClientRequest> requests;
  std::vector<RequestId> ids;
  for (size_t i = 0; i < kLengths.size(); ++i) {
    requests.push_back(MakeRequest(absl::StrFormat("r%d", i), kLengths[i], 9, 40 + i));
    ids.push_back(requests.back().request_id);
    ASSERT_TRUE(mesh.Submit(requests.back()).ok());
  }
  ASSERT_TRUE(mesh.RunUntilEnded(ids));
  for (const ClientRequest& request : requests) {
    const Answer& answer = mesh.answer(request.request_id);
    const Answer expected = plain.Run(request);
    EXPECT_EQ(expected.tokens.size(), 9u);
    EXPECT_TRUE(SameAnswer(answer, expected))
        << request.prompt.size() << " tokens\n  mesh  " << Describe(answer) << "\n  plain "
        << Describe(expected);
  }
  EXPECT_GT(mesh.router().counters().handoffs_ok, 0u);
  EXPECT_EQ(mesh.router().counters().handoffs_refused, 0u);
  EXPECT_TRUE(mesh.RunUntil([&] { return mesh.AtBaseline(); }, absl::Seconds(1)));
}

// A canary: another seed must give another sampled answer, or the comparison above sees nothing.
TEST_P(MeshEqualityTest, ComparisonSeesOneChangedToken) {
  PlainEngine plain(Golden(GetParam().family), GetParam().load());
  ClientRequest request = MakeRequest("a", 70, 9, 41);
  const Answer first = plain.Run(request);
  request.prompt[3] = (request.prompt[3] + 1) % kTestVocab;
  EXPECT_FALSE(SameAnswer(first, plain.Run(request)));
}

TEST_P(MeshEqualityTest, StopTokenAndContextLimitEndAlike) {
  TestMeshOptions options;
  options.folder = Golden(GetParam().family);
  options.load = GetParam().load();
  options.shards = GetParam().shards;
  TestMesh mesh(options);
  mesh.Start();
  PlainEngine plain(options.folder, options.load);

  ClientRequest stop = MakeRequest("stop", 130, 30, 8);
  const Answer free_run = plain.Run(stop);
  stop.stop_token_ids = {free_run.tokens[4]};
  const ClientRequest full = MakeRequest("full", 500, 100, 8);  // the context holds 512
  ASSERT_TRUE(mesh.Submit(stop).ok());
  ASSERT_TRUE(mesh.Submit(full).ok());
  ASSERT_TRUE(mesh.RunUntilEnded({"stop", "full"}));
  EXPECT_EQ(mesh.answer("stop").end, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_TRUE(SameAnswer(mesh.answer("stop"), plain.Run(stop)));
  ClientRequest room = full;  // the router asks for no more than the context holds
  room.max_tokens = 512 - 500;
  EXPECT_TRUE(SameAnswer(mesh.answer("full"), plain.Run(room))) << Describe(mesh.answer("full"));
}

INSTANTIATE_TEST_SUITE_P(
    Shards, MeshEqualityTest,
    ::testing::Values(Case{"kimi_k3", 1}, Case{"kimi_k3", 2}, Case{"kimi_k3", 3},
                      Case{"kimi_linear", 1}, Case{"kimi_linear", 2}, Case{"kimi_linear", 3},
                      Case{"kimi_k3", 2, 2}, Case{"kimi_linear", 2, 2},
                      Case{"kimi_k3", 2, 1, WeightWidth::kStored, Activations::kInt8},
                      Case{"kimi_linear", 2, 2, WeightWidth::k8bit, Activations::kInt8}),
    [](const auto& info) {
      return absl::StrFormat("%s_%d%s%s", info.param.family, info.param.shards,
                             info.param.threads > 1 ? "_threads" : "",
                             info.param.activations == Activations::kInt8 ? "_int8" : "");
    });

}  // namespace
}  // namespace deltamesh::testing
