// Configurations of the published models give the published sizes; every impossible one is refused
// with file, key and value.
#include "runtime/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/status.h"
#include "runtime/model/tensor_plan.h"
#include "tests/unit/model/checkpoint_files.h"

namespace deltamesh {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

std::string ConfigText(std::string_view name) {
  return ReadFile(std::string(DELTAMESH_SOURCE_DIR) + "/tests/unit/model/configs/" +
                  std::string(name));
}

ModelConfig RealConfig(std::string_view name) {
  absl::StatusOr<ModelConfig> config = ModelConfig::Parse(ConfigText(name), name);
  CHECK_OK(config.status());
  return *std::move(config);
}

struct Totals {
  int64_t tensors = 0, bytes = 0, parameters = 0;
};

// Over the tensors whose name contains `part`.
Totals Sum(const std::vector<ExpectedTensor>& plan, std::string_view part) {
  Totals totals;
  for (const ExpectedTensor& tensor : plan) {
    if (tensor.name.find(part) == std::string::npos) continue;
    ++totals.tensors;
    totals.bytes += tensor.bytes();
    totals.parameters += tensor.parameters;
  }
  return totals;
}

TEST(RealModels, KimiK3HasItsPublishedSizes) {
  const ModelConfig c = RealConfig("kimi_k3.json");
  EXPECT_EQ(c.family, "kimi_k3");
  EXPECT_EQ(c.layer_count(), 93);
  EXPECT_EQ(c.CountMixer(MixerKind::kKda), 69);
  EXPECT_EQ(c.CountMixer(MixerKind::kMla), 24);
  EXPECT_EQ(c.CountFfn(FfnKind::kDense), 1);
  EXPECT_EQ(c.layers[3].mixer, MixerKind::kMla);
  EXPECT_EQ(c.layers[91].mixer, MixerKind::kMla);
  EXPECT_EQ(c.layers[92].mixer, MixerKind::kMla);
  EXPECT_EQ(c.layers[92].mixer_index, 23);
  EXPECT_EQ(c.layers[90].mixer_index, 68);
  EXPECT_TRUE(c.bounded_decay && c.full_rank_gate && c.mla_gate && c.latent_norm &&
              c.experts_mxfp4);
  EXPECT_EQ(c.decay_lower_bound, -5.0f);
  EXPECT_EQ(c.context_tokens, 1048576);
  EXPECT_THAT(c.eos_ids, ElementsAre(163586));

  const auto plan = TensorPlan(c, StorageForms::KimiK3(c));
  const Totals text = Sum(plan, "");
  EXPECT_EQ(text.bytes, 1'559'965'606'912);
  // 497,220 in the published index, 168 of them of the image path.
  EXPECT_EQ(text.tensors, 497'052);
  EXPECT_EQ(Sum(plan, ".experts.").bytes, 1'446'456'066'048);
  EXPECT_EQ(Sum(plan, ".experts.").parameters, int64_t{92} * 896 * 3 * 3072 * 3584);
  EXPECT_EQ(Sum(plan, "layers.5.block_sparse_moe.").bytes, 16'102'205'952);
  EXPECT_EQ(Sum(plan, "layers.5.block_sparse_moe.experts.7.").bytes, 17'547'264);
  EXPECT_NEAR(static_cast<double>(text.parameters), 2.78e12, 0.01e12);
}

TEST(RealModels, KimiLinearHasItsPublishedSizes) {
  const ModelConfig c = RealConfig("kimi_linear_48b.json");
  EXPECT_EQ(c.family, "kimi_linear");
  EXPECT_EQ(c.CountMixer(MixerKind::kKda), 20);
  EXPECT_EQ(c.CountMixer(MixerKind::kMla), 7);
  EXPECT_FALSE(c.bounded_decay || c.full_rank_gate || c.mla_gate || c.latent_norm ||
               c.experts_mxfp4);
  EXPECT_EQ(c.q_rank, 0);
  EXPECT_EQ(c.latent, 0);
  EXPECT_EQ(c.attn_res_block, 0);
  EXPECT_EQ(c.context_tokens, 1048576);
  EXPECT_EQ(c.route_scale, 2.446f);
  const Totals all = Sum(TensorPlan(c, StorageForms::KimiLinear()), "");
  EXPECT_EQ(all.bytes, 98'245'528'576);
  EXPECT_EQ(all.tensors, 20'493);
  EXPECT_EQ(all.parameters, 49'122'681'728);
}

TEST(RealModels, StateSizesAreThePublishedOnes) {
  const StateLayout k3 = RealConfig("kimi_k3.json").ToStateLayout();
  EXPECT_EQ(k3.mla_layers * k3.latent_width(), 13'824);
  EXPECT_EQ(k3.s_floats() * 4, 6'291'456);
  EXPECT_EQ(k3.kda_layers * k3.s_floats() * 4, 434'110'464);
  EXPECT_EQ(k3.kda_layers * k3.conv_floats() * 2, 15'261'696);
  const StateLayout linear = RealConfig("kimi_linear_48b.json").ToStateLayout();
  EXPECT_EQ(linear.mla_layers * linear.latent_width(), 4'032);
  EXPECT_EQ(linear.kda_layers * linear.s_floats() * 4, 41'943'040);
  EXPECT_EQ(linear.kda_layers * linear.conv_floats() * 2, 1'474'560);
}

TEST(GoldenModels, ConfigsAreRead) {
  const absl::StatusOr<ModelConfig> k3 = ModelConfig::Load(GoldenFolder("kimi_k3_tiny"));
  ASSERT_TRUE(k3.ok()) << k3.status();
  EXPECT_EQ(k3->expert_width(), 64);
  EXPECT_EQ(k3->shared_inter(), 128);
  EXPECT_EQ(k3->attn_res_block, 2);
  EXPECT_THAT(k3->eos_ids, ElementsAre(514));
  EXPECT_EQ(k3->bos_id, 512);
  const absl::StatusOr<ModelConfig> linear = ModelConfig::Load(GoldenFolder("kimi_linear_tiny"));
  ASSERT_TRUE(linear.ok()) << linear.status();
  EXPECT_EQ(linear->expert_width(), 64);
  EXPECT_EQ(linear->CountMixer(MixerKind::kMla), 2);
}

TEST(GoldenModels, EndIdsOfGenerationConfigAreAdded) {
  CheckpointCopy copy("kimi_k3_tiny");
  copy.EditJson("generation_config.json", [](json& g) { g["eos_token_id"] = {513, 514, 521}; });
  const absl::StatusOr<ModelConfig> config = ModelConfig::Load(copy.folder());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->eos_ids, ElementsAre(513, 514, 521));
  copy.Remove("generation_config.json");
  EXPECT_TRUE(ModelConfig::Load(copy.folder()).ok());
  copy.EditText("config.json", [](std::string& text) { text.resize(text.size() / 2); });
  EXPECT_THAT(MessageOf(ModelConfig::Load(copy.folder()).status()),
              HasSubstr("config.json: not valid JSON at byte"));
  copy.Remove("config.json");
  EXPECT_EQ(ModelConfig::Load(copy.folder()).status().code(), absl::StatusCode::kNotFound);
}

// Features follow keys: a flat file with K3's keys is K3 in all but name.
TEST(Features, FollowKeysNotTheFamily) {
  const json nested = json::parse(ConfigText("kimi_k3.json"));
  const absl::StatusOr<ModelConfig> flat = ModelConfig::Parse(nested["text_config"].dump(), "flat");
  ASSERT_TRUE(flat.ok()) << flat.status();
  EXPECT_EQ(flat->family, "kimi_linear");
  const ModelConfig k3 = RealConfig("kimi_k3.json");
  EXPECT_EQ(Sum(TensorPlan(*flat, StorageForms::KimiK3(*flat)), "").bytes,
            Sum(TensorPlan(k3, StorageForms::KimiK3(k3)), "").bytes);
  json linear = json::parse(ConfigText("kimi_linear_48b.json"));
  linear["linear_attn_config"]["gate_lower_bound"] = -3.5;
  linear["mla_use_output_gate"] = true;
  const absl::StatusOr<ModelConfig> mixed = ModelConfig::Parse(linear.dump(), "mixed");
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  EXPECT_TRUE(mixed->bounded_decay && mixed->mla_gate && !mixed->full_rank_gate);
}

struct BadValue {
  const char* pointer;  // into K3's configuration
  const char* value;    // JSON, or "" to erase the key
  const char* message;  // what the error must contain
};

class BadConfig : public testing::TestWithParam<BadValue> {};

TEST_P(BadConfig, IsRefusedByName) {
  const BadValue& bad = GetParam();
  json config = json::parse(ConfigText("kimi_k3.json"));
  const json::json_pointer at(bad.pointer);
  if (*bad.value == '\0') {
    config[at.parent_pointer()].erase(at.back());
  } else {
    config[at] = json::parse(bad.value);
  }
  const absl::Status status = ModelConfig::Parse(config.dump(), "DIR/config.json").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.pointer;
  EXPECT_THAT(MessageOf(status), HasSubstr("DIR/config.json: "));
  EXPECT_THAT(MessageOf(status), HasSubstr(bad.message));
}

INSTANTIATE_TEST_SUITE_P(
    Keys, BadConfig,
    testing::Values(
        BadValue{"/text_config/hidden_size", "", "text_config.hidden_size: is missing"},
        BadValue{"/text_config/hidden_size", "\"big\"", "hidden_size: \"big\" is not an integer"},
        BadValue{"/text_config/hidden_size", "0", "hidden_size: 0 is outside [1, "},
        BadValue{"/text_config/hidden_size", "18446744073709551615", "is outside [1, "},
        BadValue{"/text_config/hidden_size", "71.5", "71.5 is not an integer"},
        BadValue{"/text_config/rms_norm_eps", "-1", "rms_norm_eps: -1 is outside"},
        BadValue{"/text_config/rms_norm_eps", "", "rms_norm_eps: is missing"},
        BadValue{"/text_config/max_position_embeddings", "", "max_position_embeddings: is missing"},
        BadValue{"/text_config/num_nextn_predict_layers", "1", "multi-token-prediction"},
        BadValue{"/text_config/mla_use_nope", "false", "mla_use_nope: must be true"},
        BadValue{"/text_config/mla_use_nope", "", "mla_use_nope: must be true"},
        BadValue{"/text_config/mla_use_output_gate", "1", "1 is neither true nor false"},
        BadValue{"/text_config/linear_attn_config", "", "linear_attn_config: is missing"},
        BadValue{"/text_config/linear_attn_config", "[]",
                 "linear_attn_config: [] is not an object"},
        BadValue{"/text_config/linear_attn_config/kda_layers", "[1, 2]",
                 "layer 3 (1-based) is in neither"},
        BadValue{"/text_config/linear_attn_config/kda_layers/0", "4",
                 "layer 4 (1-based) is listed twice"},
        BadValue{"/text_config/linear_attn_config/full_attn_layers/0", "94",
                 "94 is outside [1, 93]"},
        BadValue{"/text_config/linear_attn_config/full_attn_layers/0", "0", "0 is outside [1, 93]"},
        BadValue{"/text_config/linear_attn_config/full_attn_layers", "3", "3 is not a list"},
        BadValue{"/text_config/linear_attn_config/head_dim", "257",
                 "head_dim: 257 is outside [1, 256]"},
        BadValue{"/text_config/kv_lora_rank", "1025", "kv_lora_rank: 1025 is outside [1, 1024]"},
        BadValue{"/text_config/qk_rope_head_dim", "513",
                 "qk_rope_head_dim: 513 is outside [1, 512]"},
        BadValue{"/text_config/linear_attn_config/gate_lower_bound", "5",
                 "gate_lower_bound: 5 is outside"},
        BadValue{"/text_config/hidden_act", "\"gelu\"",
                 "\"gelu\" is not supported; silu and situ are"},
        BadValue{"/text_config/hidden_act", "", "hidden_act: is missing"},
        BadValue{"/text_config/num_experts_per_token", "897", "897 is outside [1, 896]"},
        BadValue{"/text_config/num_expert_group", "5", "5 does not divide 896"},
        BadValue{"/text_config/topk_group", "2", "topk_group: 2 is outside [1, 1]"},
        BadValue{"/text_config/num_expert_group", "112", "hold fewer than the 16 chosen"},
        BadValue{"/text_config/moe_router_activation_func", "\"relu\"", "sigmoid and softmax are"},
        BadValue{"/text_config/topk_method", "\"greedy\"", "noaux_tc is"},
        BadValue{"/text_config/routed_expert_hidden_size", "",
                 "is true without routed_expert_hidden_size"},
        BadValue{"/text_config/moe_intermediate_size", "3073", "3073 is no multiple of 32"},
        BadValue{"/text_config/attn_res_block_size", "1", "needs 94 residual sources; at most 64"},
        BadValue{"/text_config/eos_token_id", "163840", "163840 is outside [0, 163839]"},
        BadValue{"/text_config/quantization_config/quant_method", "\"awq\"",
                 "\"awq\" is not supported"},
        BadValue{"/text_config/quantization_config/format", "\"int4\"",
                 "\"int4\" is not supported"},
        BadValue{
            "/text_config/quantization_config/config_groups/group_0/weights/num_bits", "8",
            "text_config.quantization_config.config_groups.group_0.weights.num_bits: 8 is outside"},
        BadValue{"/text_config/quantization_config/config_groups/group_0/weights/group_size", "16",
                 "group_size: 16 is outside [32, 32]"},
        BadValue{"/text_config/quantization_config/config_groups", "7",
                 "config_groups: 7 is not an object"},
        BadValue{"/text_config", "[]", "text_config: [] is not an object"}));

TEST(BadText, IsRefused) {
  EXPECT_THAT(MessageOf(ModelConfig::Parse("[]", "f").status()),
              HasSubstr("f: the file is not a JSON object"));
  EXPECT_THAT(MessageOf(ModelConfig::Parse("", "f").status()), HasSubstr("f: not valid JSON"));
  EXPECT_THAT(MessageOf(ModelConfig::Parse(R"({"a": 1, "a": 2})", "f").status()),
              HasSubstr("f: key \"a\" occurs twice"));
  EXPECT_THAT(MessageOf(ModelConfig::Parse("{\"a\": \"\xff\"}", "f").status()),
              HasSubstr("not valid JSON"));
  EXPECT_THAT(MessageOf(ModelConfig::Parse("{\"a\": 1e999}", "f").status()),
              HasSubstr("not valid JSON: a number is too large for a double"));
  EXPECT_FALSE(ModelConfig::Parse(std::string(200000, '['), "f").ok());
}

}  // namespace
}  // namespace deltamesh
