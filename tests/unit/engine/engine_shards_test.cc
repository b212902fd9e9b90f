// The same tokens whether experts are computed in process or on one, two or three shards.
#include <gtest/gtest.h>

#include "runtime/expert/expert_server.h"
#include "runtime/expert/remote_experts.h"
#include "runtime/transfer/inproc_transport.h"
#include "tests/unit/engine/engine_fixture.h"

namespace deltamesh {
namespace {

using testing::GoldenFolder;
using testing::GreedySpec;
using testing::RandomPrompt;

// A model without attention: an expert shard as its process would load it.
struct Shard {
  Shard(const std::string& folder, InprocNetwork& network, int64_t index, int64_t of,
        int64_t experts, LoadOptions options)
      : pool(1) {
    info.name = info.address = "shard-" + std::to_string(index);
    info.epoch = 1;
    for (int64_t e = index; e < experts; e += of) info.experts.push_back(static_cast<int32_t>(e));
    options.experts = {.kind = ExpertSelection::Kind::kList, .experts = info.experts};
    options.only_experts = true;
    auto loaded = Model::Load(folder, options);
    CHECK(loaded.ok(), "%s", loaded.status().ToString());
    model = *std::move(loaded);
    transport = *network.Open(info.address);
    server = std::make_unique<ExpertServer>(
        transport.get(), &model->experts(), &pool,
        ExpertServerOptions{.name = info.name, .epoch = 1, .model_digest = model->digest()});
  }
  ~Shard() {
    server->Stop();
    transport.reset();
  }

  ExpertShardInfo info;
  ThreadPool pool;
  std::unique_ptr<Model> model;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<ExpertServer> server;
};

using Tokens = std::vector<std::pair<TokenId, float>>;

std::map<uint64_t, Tokens> Answers(Model& model, ExpertBackend& experts) {
  ThreadPool pool(1);
  auto engine = *Engine::Create(&model, &experts, &pool, {.step_tokens_max = 50});
  for (const int64_t tokens : {5, 70, 33}) {
    SequenceSpec spec = GreedySpec(RandomPrompt(static_cast<uint64_t>(tokens), tokens, 700), 8);
    spec.sampling.logprobs = 0;
    CHECK_OK(engine->Add(std::move(spec)).status());
  }
  std::map<uint64_t, Tokens> answers;
  while (engine->HasWork()) {
    for (const SequenceOutput& o : engine->Step().outputs) {
      EXPECT_TRUE(o.error.ok()) << o.error;
      for (const TokenOutput& t : o.tokens) answers[o.id.value].emplace_back(t.token, t.logprob);
    }
  }
  return answers;
}

struct Family {
  const char* name;
  WeightWidth weights;
  Activations activations;
};

class EngineShards : public ::testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(
    Families, EngineShards,
    ::testing::Values(Family{"kimi_k3_tiny", WeightWidth::kStored, Activations::kFloat},
                      Family{"kimi_linear_tiny", WeightWidth::kStored, Activations::kFloat},
                      Family{"kimi_k3_tiny", WeightWidth::kStored, Activations::kInt8},
                      Family{"kimi_linear_tiny", WeightWidth::k8bit, Activations::kInt8}),
    [](const auto& info) {
      return std::string(info.param.name) + "_" +
             std::string(ActivationsName(info.param.activations));
    });

TEST_P(EngineShards, EqualInProcess) {
  const std::string folder = GoldenFolder(GetParam().name);
  LoadOptions options;
  options.weights = GetParam().weights;
  options.activations = GetParam().activations;
  const auto loaded = *Model::Load(folder, options);
  Model& whole = *loaded;
  ThreadPool pool(1);
  LocalExperts local(&whole.experts(), &pool);
  const auto want = Answers(whole, local);
  ASSERT_EQ(want.size(), 3u);

  LoadOptions attention_options = options;
  attention_options.experts.kind = ExpertSelection::Kind::kNone;
  const auto attention = *Model::Load(folder, attention_options);
  EXPECT_LT(attention->weight_bytes(), whole.weight_bytes());
  for (int64_t n = 1; n <= 3; ++n) {
    InprocNetwork network;
    auto transport = *network.Open("caller");
    RemoteExperts remote(transport.get(), {.caller = "caller",
                                           .model_digest = attention->digest(),
                                           .experts = whole.config().experts,
                                           .width = whole.config().expert_width()});
    std::vector<std::unique_ptr<Shard>> shards;
    ExpertView view{.epoch = 1, .shards = {}};
    for (int64_t i = 0; i < n; ++i) {
      shards.push_back(
          std::make_unique<Shard>(folder, network, i, n, whole.config().experts, options));
      view.shards.push_back(shards.back()->info);
    }
    remote.SetView(view);
    EXPECT_EQ(Answers(*attention, remote), want) << n << " shards";
    for (const auto& s : shards) EXPECT_GT(s->server->stats().expert_rows, 0u);
    shards.clear();
    transport.reset();
  }
}

}  // namespace
}  // namespace deltamesh
