#include "services/plan/model_shape.h"

#include <filesystem>
#include <vector>

#include "nlohmann/json.hpp"
#include "runtime/base/status.h"
#include "runtime/model/config.h"
#include "runtime/model/json_reader.h"
#include "runtime/model/tensor_plan.h"

namespace deltamesh {
namespace {

using nlohmann::json;

constexpr int64_t kConfigBytesMax = int64_t{16} << 20;
constexpr int64_t kScaleBlock = 128;  // an FP8 matrix has a float per 128 x 128 values

// Matrices that FP8 checkpoints store in one byte; embeddings, the head, gates and norms stay as they are.
bool StoredInFp8(const ExpectedTensor& tensor) {
  return tensor.shape.size() == 2 && tensor.name.find("embed_tokens") == std::string::npos &&
         tensor.name.find("lm_head") == std::string::npos &&
         tensor.name.find(".gate.") == std::string::npos;
}

int64_t Fp8ScaleBytes(const ExpectedTensor& tensor) {
  const auto blocks = [](int64_t n) { return (n + kScaleBlock - 1) / kScaleBlock; };
  return blocks(tensor.shape[0]) * blocks(tensor.shape[1]) * 4;
}

ModelShape ShapeOf(const ModelConfig& c, const StorageForms& forms, bool fp8) {
  ModelShape shape;
  shape.family = c.family;
  shape.layout = c.ToStateLayout();
  shape.heads = c.heads;
  shape.key_dim = c.nope;
  shape.value_dim = c.v_dim;
  shape.context_tokens = c.context_tokens;
  shape.moe_layers = c.CountFfn(FfnKind::kMoe);
  shape.experts = c.experts;
  shape.top_k = c.top_k;
  shape.expert_width = c.expert_width();
  shape.head_parameters = c.vocab * c.hidden;
  for (const ExpectedTensor& tensor : TensorPlan(c, forms)) {
    shape.parameters += tensor.parameters;
    int64_t bytes = tensor.bytes();
    if (fp8 && StoredInFp8(tensor)) {
      bytes = tensor.parameters + Fp8ScaleBytes(tensor);
      shape.weight_bytes["F8_E4M3"] += tensor.parameters;
      shape.weight_bytes["F32"] += Fp8ScaleBytes(tensor);
    } else {
      shape.weight_bytes[std::string(DTypeName(tensor.dtype))] += bytes;
    }
    if (tensor.name.find(".experts.") != std::string::npos) {
      shape.expert_bytes += bytes;
      shape.expert_parameters += tensor.parameters;
    } else if (c.tied_embeddings || tensor.name.find("embed_tokens") == std::string::npos) {
      shape.dense_parameters += tensor.parameters;
      shape.dense_bytes += bytes;
    }
  }
  return shape;
}

// The layers of DeepSeek-V3 have the shapes that MLA and MoE layers have here; only keys differ.
absl::StatusOr<ModelShape> ReadAllMla(const json& parsed, const std::string& where) {
  JsonReader t(parsed, where, "");
  ModelConfig c;
  c.family = "all-MLA";
  c.vocab = t.Int("vocab_size", 1, int64_t{1} << 24);
  c.hidden = t.Int("hidden_size", 1, int64_t{1} << 18);
  c.layers.resize(static_cast<size_t>(t.Int("num_hidden_layers", 1, 512)));
  c.context_tokens = t.IntOr("max_position_embeddings", 0, 1, int64_t{1} << 40);
  c.tied_embeddings = t.BoolOr("tie_word_embeddings", false);
  c.heads = t.Int("num_attention_heads", 1, 4096);
  c.q_rank = t.IntOr("q_lora_rank", 0, 1, int64_t{1} << 18);
  c.kv_rank = t.Int("kv_lora_rank", 1, int64_t{1} << 16);
  c.nope = t.Int("qk_nope_head_dim", 1, 4096);
  c.rope = t.Int("qk_rope_head_dim", 0, 4096);
  c.v_dim = t.Int("v_head_dim", 1, 4096);
  c.dense_inter = t.Int("intermediate_size", 1, int64_t{1} << 19);
  c.experts = t.IntOr("n_routed_experts", 0, 0, 8192);
  const int64_t first_dense = t.IntOr("first_k_dense_replace", 0, 0, 512);
  const int64_t every = t.IntOr("moe_layer_freq", 1, 1, 512);
  if (c.experts > 0) {
    c.moe_inter = t.Int("moe_intermediate_size", 1, int64_t{1} << 18);
    c.top_k = t.Int("num_experts_per_tok", 1, c.experts);
    c.shared_experts = t.IntOr("n_shared_experts", 0, 0, 64);
  }
  RETURN_IF_ERROR(t.status());
  for (size_t i = 0; i < c.layers.size(); ++i) {
    c.layers[i].mixer = MixerKind::kMla;
    const int64_t at = static_cast<int64_t>(i);
    if (c.experts > 0 && at >= first_dense && at % every == 0) c.layers[i].ffn = FfnKind::kMoe;
  }
  StorageForms forms = StorageForms::KimiLinear();
  forms.router_bias = DType::kF32;
  bool fp8 = false;
  if (const json* q = t.Find("quantization_config"); q != nullptr) {
    JsonReader quantisation(*q, where, "quantization_config.");
    fp8 = quantisation.StringOr("quant_method", "") == "fp8";
    RETURN_IF_ERROR(quantisation.status());
  }
  return ShapeOf(c, forms, fp8);
}

bool IsObjectWith(const json& parsed, const char* key) {
  return parsed.is_object() && parsed.contains(key);
}

}  // namespace

int64_t ModelShape::total_weight_bytes() const {
  int64_t total = 0;
  for (const auto& [dtype, bytes] : weight_bytes) total += bytes;
  return total;
}

absl::StatusOr<ModelShape> ParseModelShape(std::string_view text, std::string_view where) {
  ASSIGN_OR_RETURN(const json parsed, ParseStrictJson(text, where));
  const bool ours =
      IsObjectWith(parsed, "text_config") || IsObjectWith(parsed, "linear_attn_config");
  if (!ours && IsObjectWith(parsed, "kv_lora_rank")) return ReadAllMla(parsed, std::string(where));
  if (!ours) {
    return InvalidArgument(
        "%s: has neither linear_attn_config nor text_config nor kv_lora_rank; plan reads the "
        "config.json of Kimi-Linear, Kimi K3, or a model of multi-head latent attention",
        where);
  }
  ASSIGN_OR_RETURN(const ModelConfig c, ModelConfig::Parse(text, where));
  const StorageForms forms =
      c.family == "kimi_k3" ? StorageForms::KimiK3(c) : StorageForms::KimiLinear();
  return ShapeOf(c, forms, /*fp8=*/false);
}

absl::StatusOr<ModelShape> LoadModelShape(const std::string& path) {
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  const std::string file = folder ? path + "/config.json" : path;
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(file, kConfigBytesMax));
  return ParseModelShape(text, file);
}

ModelShape KimiK3Shape() {
  ModelConfig c;
  c.family = "kimi_k3";
  c.vocab = 163840;
  c.hidden = 7168;
  c.context_tokens = 1048576;
  c.layers.resize(93);
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const bool full = (i + 1) % 4 == 0 || i + 1 == c.layers.size();
    c.layers[i] = {.mixer = full ? MixerKind::kMla : MixerKind::kKda,
                   .ffn = i == 0 ? FfnKind::kDense : FfnKind::kMoe};
  }
  c.kda_heads = c.heads = 96;
  c.kda_dim = c.nope = c.v_dim = 128;
  c.conv_taps = 4;
  c.full_rank_gate = c.bounded_decay = c.mla_gate = c.latent_norm = c.experts_mxfp4 = true;
  c.q_rank = 1536;
  c.kv_rank = 512;
  c.rope = 64;
  c.dense_inter = 33792;
  c.experts = 896;
  c.top_k = 16;
  c.shared_experts = 2;
  c.moe_inter = 3072;
  c.latent = 3584;
  c.attn_res_block = 12;
  return ShapeOf(c, StorageForms::KimiK3(c), /*fp8=*/false);
}

}  // namespace deltamesh
