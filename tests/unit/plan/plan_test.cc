// The published sizes of three models, and arithmetic done by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>

#include "runtime/base/status.h"
#include "services/plan/expert_load.h"
#include "services/plan/fleet.h"
#include "services/plan/measured_rates.h"
#include "services/plan/model_shape.h"
#include "services/plan/plan_report.h"
#include "services/plan/sizes.h"

namespace deltamesh {
namespace {

using testing::HasSubstr;

const std::string kConfigs = std::string(DELTAMESH_SOURCE_DIR) + "/tests/unit/model/configs/";

// DeepSeek-V3's published dimensions.
constexpr char kDeepSeek[] = R"({
  "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
  "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
  "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
  "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
  "qk_nope_head_dim": 128, "max_position_embeddings": 163840, "tie_word_embeddings": false,
  "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})";

ModelShape Shape(const std::string& file) {
  absl::StatusOr<ModelShape> shape = LoadModelShape(kConfigs + file);
  CHECK_OK(shape.status());
  return *std::move(shape);
}
ModelShape DeepSeek() {
  absl::StatusOr<ModelShape> shape = ParseModelShape(kDeepSeek, "deepseek");
  CHECK_OK(shape.status());
  return *std::move(shape);
}

constexpr int64_t kMillion = 1048576;

TEST(Sizes, KimiK3) {
  const ModelShape shape = Shape("kimi_k3.json");
  const SequenceSizes bf16 = SizesOf(shape, {.latent = 2, .state = 4, .conv = 2});
  EXPECT_EQ(bf16.per_token, 27648);
  EXPECT_EQ(bf16.latents(kMillion), 28991029248);
  EXPECT_EQ(SizesOf(shape, {.latent = 1}).latents(kMillion), 14495514624);
  EXPECT_EQ(bf16.state, 434110464);
  EXPECT_EQ(SizesOf(shape, {.state = 2}).state, 217055232);
  EXPECT_EQ(bf16.conv, 15261696);
  EXPECT_EQ(bf16.snapshot(), 449372160);
  EXPECT_EQ(BreakEvenTokens(bf16), 16253);
  const auto caches = CompareCaches(shape, {.conv = 2}, {.tokens = kMillion});
  EXPECT_EQ(caches[1].bytes, 112340238336);
  EXPECT_EQ(shape.parameters, KimiK3Shape().parameters);
  EXPECT_EQ(shape.weight_bytes, KimiK3Shape().weight_bytes);
  EXPECT_EQ(shape.layout, KimiK3Shape().layout);
}

TEST(Sizes, KimiLinear) {
  const ModelShape shape = Shape("kimi_linear_48b.json");
  const SequenceSizes bf16 = SizesOf(shape, {.latent = 2, .state = 4, .conv = 2});
  EXPECT_EQ(bf16.per_token, 8064);
  EXPECT_EQ(bf16.latents(kMillion), 8455716864);
  EXPECT_EQ(SizesOf(shape, {.latent = 1}).latents(kMillion), 4227858432);
  EXPECT_EQ(bf16.state, 41943040);
  EXPECT_EQ(bf16.conv, 1474560);
  EXPECT_EQ(bf16.snapshot(), 43417600);
  EXPECT_EQ(BreakEvenTokens(bf16), 5384);
  EXPECT_EQ(CompareCaches(shape, {}, {.tokens = kMillion})[1].bytes, 32614907904);
}

// What the engine keeps is what its own layout says.
TEST(Sizes, EqualTheEnginesLayout) {
  for (const char* file : {"kimi_k3.json", "kimi_linear_48b.json"}) {
    const ModelShape shape = Shape(file);
    const SequenceSizes sizes = SizesOf(shape, {});
    EXPECT_EQ(sizes.snapshot(), static_cast<double>(shape.layout.snapshot_bytes()));
    EXPECT_EQ(sizes.running(), static_cast<double>(shape.layout.slab_bytes()));
    EXPECT_EQ(sizes.per_block, static_cast<double>(shape.layout.block_bytes()));
    EXPECT_EQ(sizes.latents(65), 2 * sizes.per_block);
  }
}

TEST(Variants, DeepSeekWithMultiHeadAttentionTakes131Gigabytes) {
  const auto caches = CompareCaches(DeepSeek(), {}, {.tokens = 32768});
  ASSERT_EQ(caches[2].name, "multi-head");
  EXPECT_EQ(caches[2].bytes, 61.0 * 128 * 256 * 2 * 32768);
  EXPECT_NEAR(caches[2].bytes, 131e9, 0.05e9);
  EXPECT_EQ(caches[0].bytes, caches[1].bytes);  // it is all MLA already
  EXPECT_NEAR(caches[2].bytes / caches[1].bytes, 57, 0.2);
  EXPECT_EQ(caches[3].bytes * 16, caches[2].bytes);  // 8 of 128 heads
  EXPECT_EQ(caches[4].bytes, (16.0 * 32768 + 45.0 * 4096) * 8 * 256 * 2);
}

TEST(Variants, ThreeToOneHybridsKeepUpToThreeQuartersLess) {
  // Exactly three to one: three quarters of the latents are not there.
  ModelShape exact = Shape("kimi_linear_48b.json");
  exact.layout.kda_layers = 21;
  exact.layout.mla_layers = 7;
  const auto at = [](const ModelShape& shape, int64_t tokens) {
    const auto caches = CompareCaches(shape, {.conv = 2}, {.tokens = tokens});
    return 1 - caches[0].bytes / caches[1].bytes;
  };
  const auto exactly = CompareCaches(exact, {}, {});
  EXPECT_EQ(exactly[0].per_token * 4, exactly[1].per_token);
  EXPECT_GT(at(exact, kMillion), 0.748);
  EXPECT_LT(at(exact, kMillion), 0.75);
  EXPECT_NEAR(at(Shape("kimi_k3.json"), kMillion), 0.738, 0.001);
  EXPECT_NEAR(at(Shape("kimi_linear_48b.json"), kMillion), 0.739, 0.001);
  EXPECT_LT(at(exact, 1024), 0) << "a short sequence is better off without a state";
}

TEST(Weights, EqualThePublishedCounts) {
  EXPECT_EQ(Shape("kimi_linear_48b.json").total_weight_bytes() / 1000000000, 98);
  const ModelShape k3 = Shape("kimi_k3.json");
  // Routed experts: 4 bits a value and a byte of scale for 32 of them.
  EXPECT_EQ(k3.expert_bytes, int64_t{92} * 896 * 3 * 3072 * 3584 / 32 * 17);
  const ModelShape deepseek = DeepSeek();
  EXPECT_NEAR(static_cast<double>(deepseek.parameters), 671.03e9, 0.01e9);
  EXPECT_GT(deepseek.weight_bytes.at("F8_E4M3"), 660000000000);
}

TEST(Fleet, ByHand) {
  const ModelShape shape = KimiK3Shape();
  const SequenceSizes sizes = SizesOf(shape, {.latent = 2, .state = 4, .conv = 2});
  WorkerMachine machine;
  machine.expert_shards = 16;
  machine.memory_bytes =
      static_cast<double>(shape.total_weight_bytes() - shape.expert_bytes) + 100e9;
  machine.link_bytes_per_second = 50e9;
  machine.link_seconds = 0.001;
  EXPECT_NEAR(MemoryForSequences(shape, machine), 100e9, 1);
  const double each = sizes.running() + 2048 * sizes.per_block;
  EXPECT_EQ(SessionsPerWorker(shape, sizes, machine, 131072), static_cast<int64_t>(100e9 / each));
  EXPECT_NEAR(HandoffSeconds(sizes, machine, 0), 0.001 + 449372160 / 50e9, 1e-12);
  EXPECT_NEAR(HandoffSeconds(sizes, machine, 65), 0.001 + (449372160 + 2 * 64 * 27648) / 50e9,
              1e-12);
  PlannedTraffic traffic = {.requests_per_second = 10,
                            .input_tokens = 100000,
                            .uncached_tokens = 4000,
                            .output_tokens = 500,
                            .prefill_tokens_per_second = 10000,
                            .decode_tokens_per_second = 1000,
                            .stream_tokens_per_second = 50,
                            .utilisation = 0.5};
  const absl::StatusOr<Fleet> fleet = PlanFleet(shape, sizes, machine, traffic, {});
  ASSERT_TRUE(fleet.ok()) << fleet.status();
  EXPECT_EQ(fleet->resident_sequences, 100);
  EXPECT_EQ(fleet->prefill.by("compute"), 8);  // 40,000 tokens/s, 5,000 each
  EXPECT_EQ(fleet->decode.by("compute"), 10);  // 5,000 tokens/s, 500 each
  EXPECT_EQ(fleet->decode.by("memory"), 4);    // 100 sequences of 100,500 tokens, 30 a worker
  // Float rows of 3,584 values to 16 experts of 92 layers, beside the state.
  const double row = 92.0 * 16 * 3584 * 4, state = 10 * (449372160 + 63 * 64 * 27648.0);
  EXPECT_EQ(fleet->prefill.by("link"), std::ceil((state + 40000 * row) / 25e9));
  EXPECT_EQ(fleet->decode.by("link"), std::ceil((state + 5000 * row) / 25e9));
  EXPECT_EQ(fleet->prefill.largest().name, "link");
  EXPECT_EQ(fleet->decode.largest().name, "compute");
  WorkerMachine whole = machine;
  whole.expert_shards = 0;
  whole.memory_bytes += static_cast<double>(shape.expert_bytes);
  const absl::StatusOr<Fleet> alone = PlanFleet(shape, sizes, whole, traffic, {});
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->prefill.count(), 8);
  EXPECT_EQ(alone->decode.by("link"), 1);
  EXPECT_TRUE(alone->expert.limits.empty());
  traffic.uncached_tokens = 100001;
  EXPECT_THAT(MessageOf(PlanFleet(shape, sizes, machine, traffic, {}).status()),
              HasSubstr("uncached-tokens"));
  traffic.uncached_tokens = 1;
  const auto refuses = [&](const PlannedTraffic& t, const char* name) {
    EXPECT_THAT(MessageOf(PlanFleet(shape, sizes, machine, t, {}).status()), HasSubstr(name));
  };
  PlannedTraffic odd = traffic;
  odd.utilisation = std::numeric_limits<double>::quiet_NaN();
  refuses(odd, "utilisation");
  odd = traffic;
  odd.stream_tokens_per_second = std::numeric_limits<double>::quiet_NaN();
  refuses(odd, "stream-rate");
  odd = traffic;
  odd.output_tokens = std::numeric_limits<int64_t>::max();
  refuses(odd, "output-tokens");
  PlanQuestions questions;
  questions.lengths = {std::numeric_limits<int64_t>::max()};
  EXPECT_THAT(MessageOf(PlanDocument(shape, questions).status()), HasSubstr("lengths"));
  machine.memory_bytes = 1e9;
  EXPECT_TRUE(absl::IsResourceExhausted(PlanFleet(shape, sizes, machine, traffic, {}).status()));
}

// K3 on shards, small enough to follow.
struct Shards {
  ModelShape shape = KimiK3Shape();
  SequenceSizes sizes = SizesOf(shape, {.latent = 2, .state = 4, .conv = 2});
  WorkerMachine machine;
  PlannedTraffic traffic = {.requests_per_second = 1,
                            .input_tokens = 100000,
                            .uncached_tokens = 4096,
                            .output_tokens = 500,
                            .prefill_tokens_per_second = 10000,
                            .decode_tokens_per_second = 1000,
                            .stream_tokens_per_second = 50,
                            .step_tokens = 1024,
                            .utilisation = 0.5};
  Shards() {
    machine.expert_shards = 1;
    machine.memory_bytes = 1.5e12;
    machine.link_bytes_per_second = 1e14;
    machine.expert_flops_per_second = 1e18;
    machine.expert_read_bytes_per_second = 1e15;
  }
  Fleet Plan() const {
    const absl::StatusOr<Fleet> fleet = PlanFleet(shape, sizes, machine, traffic, {});
    CHECK_OK(fleet.status());
    return *fleet;
  }
};

TEST(Experts, FollowEachLimitAndSayWhich) {
  Shards s;
  const double expert = 3.0 * 3072 * 3584;  // values of one, in one layer
  Fleet fleet = s.Plan();
  EXPECT_EQ(fleet.expert.count(), 1);
  EXPECT_EQ(fleet.expert.largest().name, "asked");
  EXPECT_EQ(fleet.experts.flops_per_token, 92 * 16 * 2 * expert);
  EXPECT_EQ(fleet.experts.row_bytes_per_token, 92.0 * 16 * 3584 * 4);

  // Memory: whole ids of experts, one in every layer.
  s.machine.memory_bytes = 600e9;
  const double id = 92 * expert / 32 * 17;
  fleet = s.Plan();
  EXPECT_EQ(fleet.expert.count(), std::ceil(896 / std::floor(600e9 / id)));
  EXPECT_EQ(fleet.expert.largest().name, "memory");
  s.machine.memory_bytes = 1.5e12;

  s.machine.expert_flops_per_second = 100e12;
  fleet = s.Plan();
  EXPECT_EQ(fleet.expert.count(), std::ceil(4596 * 92 * 16 * 2 * expert / 50e12));
  EXPECT_EQ(fleet.expert.largest().name, "compute");
  s.machine.expert_flops_per_second = 1e18;

  // Reading: four steps of 1,024 prompt tokens, and 50 steps of ten sequences at a decode worker.
  s.machine.expert_read_bytes_per_second = 10e12;
  fleet = s.Plan();
  ASSERT_EQ(fleet.decode.count(), 1);
  const auto read = [&](double tokens) {
    return 896 * id * (1 - std::pow(1 - 16.0 / 896, tokens));
  };
  EXPECT_NEAR(fleet.experts.read_bytes_per_second, 4 * read(1024) + 50 * read(10), 1e3);
  EXPECT_EQ(fleet.expert.count(), std::ceil((4 * read(1024) + 50 * read(10)) / 5e12));
  EXPECT_EQ(fleet.expert.largest().name, "reading");
  s.machine.expert_read_bytes_per_second = 1e15;

  s.machine.link_bytes_per_second = 50e9;
  fleet = s.Plan();
  EXPECT_EQ(fleet.expert.count(), std::ceil(4596 * 92.0 * 16 * 3584 * 4 / 25e9));
  EXPECT_EQ(fleet.expert.largest().name, "link");
}

TEST(Experts, GrowWithTheTraffic) {
  Shards s;
  s.machine.link_bytes_per_second = 50e9;
  s.machine.expert_flops_per_second = s.machine.expert_read_bytes_per_second = 0;
  s.machine.memory_bytes = 1.6e12;
  const int64_t few = s.Plan().expert.count();
  s.traffic.requests_per_second = 1000;
  const Fleet many = s.Plan();
  EXPECT_GT(many.expert.count(), 500 * few);
  const auto document = PlanDocument(
      s.shape, {.widths = {.latent = 2, .conv = 2}, .machine = s.machine, .traffic = s.traffic});
  ASSERT_TRUE(document.ok()) << document.status();
  const auto copies = (*document)["fleet"]["expert"]["copies"].get<int64_t>();
  EXPECT_GT(copies, 1);
  EXPECT_EQ(copies, (many.expert.count() + 895) / 896);
  // Without figures of their own, expert workers are what reaches these rates with all weights.
  const double per_token =
      2 * (static_cast<double>(s.shape.dense_parameters) - 163840.0 * 7168);  // without the head
  EXPECT_EQ(many.experts.flops_per_second, 10000 * (per_token + many.experts.flops_per_token));
  EXPECT_GT(s.shape.dense_parameters, 50'000'000'000);
  EXPECT_LT(s.shape.dense_parameters + s.shape.expert_parameters, s.shape.parameters);
}

// Kimi-Linear from its config: 20 KDA and 7 MLA layers, one dense and 26 MoE.
TEST(Experts, WorkersRatesFollowFromTheConfigByHand) {
  Shards s;
  s.shape = Shape("kimi_linear_48b.json");
  s.sizes = SizesOf(s.shape, {});
  s.machine.expert_flops_per_second = s.machine.expert_read_bytes_per_second = 0;
  s.traffic.decode_tokens_per_second = 50;  // one sequence a step, 50 steps a second
  const Fleet fleet = s.Plan();
  // q, k, v 28,311,552, their filters 49,152, A_log and dt_bias 4,128, decay and gate 819,200 each, beta
  // 73,728, norm 128, output 9,437,184.
  constexpr double kKda = 39514272;
  // q 14,155,776, latents 1,327,104, norm 512, keys and values 4,194,304, output 9,437,184.
  constexpr double kMla = 29114880;
  // 55 norms of 2,304, a GLU of 9,216, and 26 routers of 590,080 with a shared expert of 7,077,888.
  constexpr double kRest = 126720 + 63700992 + 26 * (590080 + 7077888);
  constexpr double kHead = 377487360, kExpert = 7077888;
  constexpr double kDense = 20 * kKda + 7 * kMla + kRest;
  static_assert(kDense == 1257284480);
  // A token of a prompt goes to 8 experts of each of 26 layers and needs no logits. With the head its
  // parameters are 3.1e9, the A3B of the model's name.
  EXPECT_EQ(fleet.experts.flops_per_second, 10000 * 2 * (kDense + 26 * 8 * kExpert));
  // A step of decoding reads them and the head, two bytes each and four of A_log and dt_bias, and looks up a
  // row of the embedding table.
  EXPECT_EQ(fleet.experts.reads_per_second,
            50 * (2 * (kDense + kHead) + 2 * 20 * 4128 + 2 * 26 * 8 * kExpert));
  EXPECT_EQ(fleet.experts.reads_per_second, 310705510400);
}

TEST(Weights, ATiedEmbeddingTableIsTheHead) {
  std::ifstream file(kConfigs + "kimi_linear_48b.json");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string untied = "\"tie_word_embeddings\": false";
  ASSERT_THAT(text, HasSubstr(untied));
  const auto own = ParseModelShape(text, "own");
  text.replace(text.find(untied), untied.size(), "\"tie_word_embeddings\": true");
  const auto tied = ParseModelShape(text, "tied");
  ASSERT_TRUE(own.ok() && tied.ok()) << own.status() << tied.status();
  EXPECT_EQ(tied->dense_bytes, own->dense_bytes);
  EXPECT_EQ(own->total_weight_bytes() - own->expert_bytes - own->dense_bytes, 163840 * 2304 * 2);
  EXPECT_EQ(tied->total_weight_bytes() - tied->expert_bytes, tied->dense_bytes);
}

TEST(Experts, OfChosenOnesEveryStepReadsTheUnion) {
  // By drawing, for few tokens of a small model.
  ModelShape shape = KimiK3Shape();
  shape.experts = 8;
  shape.top_k = 2;
  std::mt19937 random(1);
  for (const int64_t tokens : {1, 2, 3, 9}) {
    int64_t touched = 0;
    constexpr int kDraws = 20000;
    for (int draw = 0; draw < kDraws; ++draw) {
      unsigned seen = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        const unsigned a = random() % 8, b = (a + 1 + random() % 7) % 8;
        seen |= 1u << a | 1u << b;
      }
      touched += std::popcount(seen);
    }
    const double share = static_cast<double>(touched) / kDraws / 8;
    EXPECT_NEAR(ExpertBytesOfStep(shape, static_cast<double>(tokens)) /
                    static_cast<double>(shape.expert_bytes),
                share, 0.01);
  }
}

TEST(Routers, ByCpuAndByLiveRequests) {
  Shards s;
  s.traffic.requests_per_second = 100;
  RouterCost cost = {.request_seconds = 0.001,
                     .prompt_token_seconds = 1e-7,
                     .answer_token_seconds = 2e-5,
                     .live_requests = 1000};
  // 0.001 + 0.01 + 0.01 s a request, half of a core each.
  const auto fleet = PlanFleet(s.shape, s.sizes, s.machine, s.traffic, cost);
  ASSERT_TRUE(fleet.ok()) << fleet.status();
  EXPECT_NEAR(fleet->router_cpu_per_request, 0.021, 1e-12);
  EXPECT_EQ(fleet->router.by("compute"), 5);   // 4.2
  EXPECT_EQ(fleet->router.by("requests"), 2);  // 1,000 that stream for 10 s, 41 prompts
  EXPECT_EQ(fleet->router.largest().name, "compute");
  cost.live_requests = 100;
  EXPECT_EQ(PlanFleet(s.shape, s.sizes, s.machine, s.traffic, cost)->router.count(), 11);
}

// What was counted with wrapped or unchecked numbers before.
TEST(Fleet, SaysWhenATrafficIsBeyondCounting) {
  Shards s;
  s.traffic.requests_per_second = 1e9;
  s.traffic.prefill_tokens_per_second = 1e-3;
  EXPECT_THAT(MessageOf(PlanFleet(s.shape, s.sizes, s.machine, s.traffic, {}).status()),
              HasSubstr("prefill workers by compute"));
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const ModelShape shape = KimiK3Shape();
  const auto refuses = [&](const char* name, auto change) {
    for (const double odd : {kNan, kInf, -1.0, 1e300}) {
      PlanQuestions q;
      q.machine = s.machine;
      q.traffic = s.traffic;
      q.traffic.prefill_tokens_per_second = 1e9;
      change(q, odd);
      const std::string message = MessageOf(PlanDocument(shape, q).status());
      EXPECT_THAT(message, testing::StartsWith(std::string(name) + ": ")) << odd;
      EXPECT_THAT(message, HasSubstr("; use ")) << odd;
    }
  };
  const auto machine_alone = [](auto& q, double v) {
    q.traffic.requests_per_second = 0;
    q.machine.memory_bytes = v;
  };
  refuses("memory", machine_alone);
  refuses("memory", [](auto& q, double v) { q.machine.memory_bytes = v; });
  refuses("link", [](auto& q, double v) { q.machine.link_bytes_per_second = v; });
  refuses("expert-tflops", [](auto& q, double v) { q.machine.expert_flops_per_second = v; });
  refuses("expert-read", [](auto& q, double v) { q.machine.expert_read_bytes_per_second = v; });
  refuses("requests", [](auto& q, double v) { q.traffic.requests_per_second = v; });
  refuses("prefill-rate", [](auto& q, double v) { q.traffic.prefill_tokens_per_second = v; });
  refuses("decode-rate", [](auto& q, double v) { q.traffic.decode_tokens_per_second = v; });
  refuses("stream-rate", [](auto& q, double v) { q.traffic.stream_tokens_per_second = v; });
  refuses("utilisation", [](auto& q, double v) { q.traffic.utilisation = v; });
  refuses("router-request-ms", [](auto& q, double v) { q.router.request_seconds = v; });
  refuses("router-prompt-us", [](auto& q, double v) { q.router.prompt_token_seconds = v; });
  refuses("router-answer-us", [](auto& q, double v) { q.router.answer_token_seconds = v; });
}

TEST(Report, ByteCountsBeyondCountingAreRefused) {
  ModelShape shape = DeepSeek();
  shape.heads = 4096;
  shape.key_dim = shape.value_dim = 4096;
  PlanQuestions q;
  q.lengths = {64};
  q.variants.tokens = kPlanTokensMax;
  q.variants.value_bytes = 4;
  shape.layout.mla_layers = 512;
  EXPECT_THAT(MessageOf(PlanDocument(shape, q).status()),
              HasSubstr("compare-tokens: 1,000,000,000"));
}

TEST(Report, TablesAndDocumentAgree) {
  PlanQuestions questions;
  questions.machine.memory_bytes = 4e12;
  questions.traffic = {.requests_per_second = 1,
                       .input_tokens = 1000,
                       .uncached_tokens = 500,
                       .output_tokens = 100,
                       .prefill_tokens_per_second = 1000,
                       .decode_tokens_per_second = 1000,
                       .stream_tokens_per_second = 50};
  const auto document = PlanDocument(KimiK3Shape(), questions);
  ASSERT_TRUE(document.ok()) << document.status();
  EXPECT_EQ((*document)["sequence"]["state"].get<int64_t>(), 434110464);
  EXPECT_EQ((*document)["fleet"]["prefill"]["workers"].get<int64_t>(), 1);
  EXPECT_EQ((*document)["fleet"]["prefill"]["decided_by"], "compute");
  EXPECT_FALSE((*document)["fleet"].contains("expert"));
  std::ostringstream text;
  PrintPlan(*document, text);
  EXPECT_THAT(text.str(), HasSubstr("434,110,464 bytes"));
  EXPECT_THAT(text.str(), HasSubstr("multi-head"));
  EXPECT_THAT(text.str(), HasSubstr("router               1   by compute (compute 1, requests 1)"));
  EXPECT_THAT(text.str(), HasSubstr("every worker holds them"));
  questions.machine.expert_shards = 4;
  const auto sharded = PlanDocument(KimiK3Shape(), questions);
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  EXPECT_EQ((*sharded)["fleet"]["expert"]["workers"].get<int64_t>(), 4);
  std::ostringstream table;
  PrintPlan(*sharded, table);
  EXPECT_THAT(table.str(), HasSubstr("expert               4   by asked ("));
  questions.machine.memory_bytes = 0;
  EXPECT_THAT(MessageOf(PlanDocument(KimiK3Shape(), questions).status()), HasSubstr("memory"));
}

TEST(Rates, ComeFromABenchmark) {
  const std::string path = testing::TempDir() + "/bench.json";
  const auto read = [&](const std::string& text) {
    std::ofstream(path) << text;
    return ReadMeasuredRates(path);
  };
  const auto rates = read(R"({"results": [
    {"test": "prefill", "n": 512, "seqs": 1, "median_tps": 180.0},
    {"test": "prefill", "n": 2048, "seqs": 1, "median_tps": 170.0},
    {"test": "decode", "n": 32, "seqs": 8, "median_tps": 64.0},
    {"test": "decode", "n": 32, "seqs": 1, "median_tps": 29.0},
    {"test": "handoff", "n": 1, "seqs": 1, "median_gbs": 2.0}]})");
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_EQ(rates->prefill, 170);
  EXPECT_EQ(rates->decode, 64);
  EXPECT_EQ(rates->stream, 8);
  EXPECT_THAT(MessageOf(read("[]").status()), HasSubstr("no list of results"));
  EXPECT_THAT(MessageOf(read(R"({"results": []})").status()), HasSubstr("neither prefill"));
  EXPECT_THAT(MessageOf(read(R"({"results": [{"test": "decode", "n": 1}]})").status()),
              HasSubstr("results.seqs"));
}

TEST(Errors, NameFileKeyAndRemedy) {
  const auto message = [](std::string_view text) {
    return MessageOf(ParseModelShape(text, "c.json").status());
  };
  EXPECT_THAT(message("{}"), HasSubstr("c.json: has neither linear_attn_config"));
  EXPECT_THAT(message("[1]"), HasSubstr("c.json"));
  EXPECT_THAT(message("{"), HasSubstr("c.json"));
  EXPECT_THAT(message(R"({"kv_lora_rank": 512})"), HasSubstr("vocab_size"));
  EXPECT_THAT(message(R"({"kv_lora_rank": -1, "vocab_size": 9})"), HasSubstr("c.json"));
  EXPECT_TRUE(absl::IsNotFound(LoadModelShape(kConfigs + "none.json").status()));
  EXPECT_THAT(MessageOf(BytesOfType("latents", "int4").status()), HasSubstr("latents"));
}

}  // namespace
}  // namespace deltamesh
