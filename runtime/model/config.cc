#include "runtime/model/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "kernels/base/types.h"
#include "kernels/kda/kda.h"
#include "kernels/mla/mla.h"
#include "kernels/residual/residual.h"
#include "runtime/base/status.h"
#include "runtime/model/json_reader.h"

namespace deltamesh {
namespace {

using nlohmann::json;

// Bounds far above any published model; small enough that no product of them overflows 64 bits.
constexpr int64_t kConfigBytesMax = int64_t{16} << 20;
constexpr int64_t kLayersMax = 512;
constexpr int64_t kVocabMax = int64_t{1} << 24;
constexpr int64_t kWidthMax = int64_t{1} << 18;
constexpr int64_t kInterMax = int64_t{1} << 19;
constexpr int64_t kHeadsMax = 4096;
constexpr int64_t kHeadDimMax = 1024;
constexpr int64_t kTapsMax = 16;
constexpr int64_t kExpertsMax = 8192;
constexpr int64_t kContextMax = int64_t{1} << 40;

void ReadSizes(JsonReader& t, ModelConfig& c) {
  c.vocab = t.Int("vocab_size", 1, kVocabMax);
  c.hidden = t.Int("hidden_size", 1, kWidthMax);
  c.rms_eps = static_cast<float>(t.Number("rms_norm_eps", 1e-12, 1));
  c.layers.resize(static_cast<size_t>(t.Int("num_hidden_layers", 1, kLayersMax)));
  c.tied_embeddings = t.BoolOr("tie_word_embeddings", false);
  c.context_tokens = t.IntOr("max_position_embeddings", 0, 1, kContextMax);
  if (c.context_tokens == 0) c.context_tokens = t.IntOr("model_max_length", 0, 1, kContextMax);
  if (c.context_tokens == 0) {
    t.FailKey("max_position_embeddings",
              "is missing, and so is model_max_length; one gives the context");
  }
  if (t.IntOr("num_nextn_predict_layers", 0, 0, kLayersMax) != 0) {
    t.FailKey("num_nextn_predict_layers", "multi-token-prediction layers are not supported; use 0");
  }
}

void ReadMla(JsonReader& t, ModelConfig& c) {
  c.heads = t.Int("num_attention_heads", 1, kHeadsMax);
  c.q_rank = t.IntOr("q_lora_rank", 0, 1, kWidthMax);
  c.kv_rank = t.Int("kv_lora_rank", 1, kernels::kMaxRank);
  c.nope = t.Int("qk_nope_head_dim", 1, kHeadDimMax);
  c.rope = t.Int("qk_rope_head_dim", 1, kernels::kMaxRope);
  c.v_dim = t.Int("v_head_dim", 1, kHeadDimMax);
  c.mla_gate = t.BoolOr("mla_use_output_gate", false);
  if (!t.BoolOr("mla_use_nope", false)) {
    t.FailKey("mla_use_nope", "must be true: attention with rotated positions is not supported");
  }
}

// The lists are 1-based and must partition the layers.
void ReadLayerLists(JsonReader& la, ModelConfig& c) {
  const int64_t layers = c.layer_count();
  std::vector<int> seen(c.layers.size(), 0);
  const auto mark = [&](std::string_view key, MixerKind kind) {
    for (const int64_t number : la.Ints(key, 1, layers)) {
      c.layers[number - 1].mixer = kind;
      if (++seen[number - 1] > 1) {
        la.FailKey(key, absl::StrFormat("layer %d (1-based) is listed twice in kda_layers and "
                                        "full_attn_layers; the lists must partition the layers",
                                        number));
      }
    }
  };
  mark("kda_layers", MixerKind::kKda);
  mark("full_attn_layers", MixerKind::kMla);
  if (!la.status().ok()) return;
  for (int64_t i = 0; i < layers; ++i) {
    if (seen[i] != 0) continue;
    la.FailKey("kda_layers",
               absl::StrFormat("layer %d (1-based) is in neither kda_layers nor "
                               "full_attn_layers; the lists must partition the layers",
                               i + 1));
    return;
  }
}

void ReadKda(JsonReader& la, ModelConfig& c) {
  c.kda_heads = la.Int("num_heads", 1, kHeadsMax);
  c.kda_dim = la.Int("head_dim", 1, kernels::kMaxKdaDim);
  c.conv_taps = la.Int("short_conv_kernel_size", 2, kTapsMax);
  c.full_rank_gate = la.BoolOr("use_full_rank_gate", false);
  c.bounded_decay = la.Has("gate_lower_bound");
  if (c.bounded_decay) {
    c.decay_lower_bound = static_cast<float>(la.NumberOr("gate_lower_bound", -1, -1e4, -1e-6));
  }
  ReadLayerLists(la, c);
}

void ReadActivation(JsonReader& t, ModelConfig& c) {
  const std::string name = t.String("hidden_act");
  if (name == "silu") {
    c.activation = kernels::Activation::kSilu;
  } else if (name == "situ") {
    c.activation = kernels::Activation::kSitu;
    c.act_beta = static_cast<float>(t.NumberOr("activation_situ_beta", 1, 1e-3, 1e6));
    c.act_linear_beta = static_cast<float>(t.NumberOr("activation_situ_linear_beta", 0, 1e-3, 1e6));
  } else if (t.status().ok()) {
    t.FailKey("hidden_act", absl::StrFormat("\"%s\" is not supported; silu and situ are", name));
  }
}

void ReadRouter(JsonReader& t, ModelConfig& c) {
  c.top_k = t.Int("num_experts_per_token", 1, c.experts);
  c.expert_groups = t.IntOr("num_expert_group", 1, 1, c.experts);
  c.top_groups = t.IntOr("topk_group", 1, 1, c.expert_groups);
  c.renormalize = t.BoolOr("moe_renormalize", true);
  c.route_scale = static_cast<float>(t.NumberOr("routed_scaling_factor", 1, 1e-6, 1e6));
  const std::string scores = t.StringOr("moe_router_activation_func", "sigmoid");
  c.sigmoid_scores = scores == "sigmoid";
  if (scores != "sigmoid" && scores != "softmax") {
    t.FailKey("moe_router_activation_func",
              absl::StrFormat("\"%s\" is not supported; sigmoid and softmax are", scores));
  }
  const std::string method = t.StringOr("topk_method", "noaux_tc");
  if (method != "noaux_tc") {
    t.FailKey("topk_method", absl::StrFormat("\"%s\" is not supported; noaux_tc is", method));
  }
  if (c.experts % c.expert_groups != 0) {
    t.FailKey("num_expert_group",
              absl::StrFormat("%d does not divide %d experts", c.expert_groups, c.experts));
  } else if (c.experts / c.expert_groups * c.top_groups < c.top_k) {
    t.FailKey("topk_group", absl::StrFormat("%d groups of %d experts hold fewer than the %d chosen",
                                            c.top_groups, c.experts / c.expert_groups, c.top_k));
  }
}

void ReadFeedForward(JsonReader& t, ModelConfig& c) {
  ReadActivation(t, c);
  c.dense_inter = t.Int("intermediate_size", 1, kInterMax);
  c.experts = t.IntOr("num_experts", 0, 0, kExpertsMax);
  if (c.experts == 0) return;
  const int64_t first_dense = t.IntOr("first_k_dense_replace", 0, 0, kLayersMax);
  const int64_t every = t.IntOr("moe_layer_freq", 1, 1, kLayersMax);
  for (int64_t i = 0; i < c.layer_count(); ++i) {
    if (i >= first_dense && i % every == 0) c.layers[i].ffn = FfnKind::kMoe;
  }
  c.moe_inter = t.Int("moe_intermediate_size", 1, kWidthMax);
  c.shared_experts = t.IntOr("num_shared_experts", 0, 0, 64);
  c.latent = t.IntOr("routed_expert_hidden_size", 0, 1, kWidthMax);
  c.latent_norm = t.BoolOr("latent_moe_use_norm", false);
  if (c.latent_norm && c.latent == 0) {
    t.FailKey("latent_moe_use_norm", "is true without routed_expert_hidden_size");
  }
  ReadRouter(t, c);
}

void ReadResidual(JsonReader& t, ModelConfig& c) {
  c.attn_res_block = t.IntOr("attn_res_block_size", 0, 1, kLayersMax);
  if (c.attn_res_block == 0) return;
  const int64_t sources = (c.layer_count() + c.attn_res_block - 1) / c.attn_res_block + 1;
  if (sources > kernels::kMaxSources) {
    t.FailKey(
        "attn_res_block_size",
        absl::StrFormat("%d over %d layers needs %d residual sources; at most %d are supported",
                        c.attn_res_block, c.layer_count(), sources, kernels::kMaxSources));
  }
}

// Only MXFP4 as compressed-tensors packs it, and only routed experts are stored so.
void ReadQuantisation(const json& quantisation, std::string_view where, std::string_view path,
                      JsonReader& t, ModelConfig& c) {
  JsonReader q(quantisation, std::string(where), absl::StrFormat("%s.", path));
  const std::string method = q.String("quant_method");
  const std::string format = q.StringOr("format", "mxfp4-pack-quantized");
  if (q.status().ok() && method != "compressed-tensors") {
    q.FailKey("quant_method",
              absl::StrFormat("\"%s\" is not supported; compressed-tensors is", method));
  }
  if (format != "mxfp4-pack-quantized") {
    q.FailKey("format",
              absl::StrFormat("\"%s\" is not supported; mxfp4-pack-quantized is", format));
  }
  for (const auto& [name, group] : q.Object("config_groups").items()) {
    JsonReader g(group, std::string(where), absl::StrFormat("%s.config_groups.%s.", path, name));
    JsonReader w(g.Object("weights"), std::string(where),
                 absl::StrFormat("%s.config_groups.%s.weights.", path, name));
    w.Int("num_bits", 4, 4);
    w.Int("group_size", kernels::kMxBlock, kernels::kMxBlock);
    if (w.StringOr("type", "float") != "float") w.FailKey("type", "only float is supported");
    if (g.Has("input_activations"))
      g.FailKey("input_activations", "quantised inputs are not supported");
    q.Fail(g.status());
    q.Fail(w.status());
  }
  t.Fail(q.status());
  c.experts_mxfp4 = c.experts > 0;
  for (const int64_t width : {c.moe_inter, c.expert_width()}) {
    if (c.experts_mxfp4 && width % kernels::kMxBlock != 0) {
      t.FailKey("moe_intermediate_size",
                absl::StrFormat("expert width %d is no multiple of %d, which MXFP4 needs", width,
                                kernels::kMxBlock));
    }
  }
}

// An id or a list of ids.
void AddIds(JsonReader& reader, std::string_view key, int64_t vocab, std::set<TokenId>& ids) {
  const json* value = reader.Find(key);
  if (value == nullptr) return;
  if (value->is_array()) {
    for (const int64_t id : reader.Ints(key, 0, vocab - 1)) ids.insert(static_cast<TokenId>(id));
  } else {
    ids.insert(static_cast<TokenId>(reader.Int(key, 0, vocab - 1)));
  }
}

void NumberMixers(ModelConfig& c) {
  int64_t next[2] = {0, 0};
  for (LayerKind& layer : c.layers) layer.mixer_index = next[static_cast<int>(layer.mixer)]++;
}

absl::StatusOr<ModelConfig> FromJson(const json& top_json, const std::string& where) {
  ModelConfig c;
  JsonReader top(top_json, where, "");
  RETURN_IF_ERROR(top.status());
  const bool nested = top.Has("text_config");
  c.family = nested ? "kimi_k3" : "kimi_linear";
  JsonReader t(nested ? top.Object("text_config") : top_json, where, nested ? "text_config." : "");
  RETURN_IF_ERROR(top.status());

  ReadSizes(t, c);
  JsonReader la(t.Object("linear_attn_config"), where,
                nested ? "text_config.linear_attn_config." : "linear_attn_config.");
  RETURN_IF_ERROR(t.status());
  ReadKda(la, c);
  RETURN_IF_ERROR(la.status());
  ReadMla(t, c);
  ReadFeedForward(t, c);
  RETURN_IF_ERROR(t.status());
  ReadResidual(t, c);
  for (JsonReader* reader : {&t, &top}) {
    if (const json* q = reader->Find("quantization_config"); q != nullptr && !c.experts_mxfp4) {
      ReadQuantisation(
          *q, where,
          nested && reader == &t ? "text_config.quantization_config" : "quantization_config", t, c);
    }
  }
  std::set<TokenId> eos;
  for (JsonReader* reader : {&t, &top}) {
    AddIds(*reader, "eos_token_id", c.vocab, eos);
    c.bos_id = static_cast<TokenId>(reader->IntOr("bos_token_id", c.bos_id, 0, c.vocab - 1));
    c.pad_id = static_cast<TokenId>(reader->IntOr("pad_token_id", c.pad_id, 0, c.vocab - 1));
    RETURN_IF_ERROR(reader->status());
  }
  c.eos_ids.assign(eos.begin(), eos.end());
  NumberMixers(c);
  return c;
}

absl::Status AddGenerationConfig(const std::string& path, ModelConfig& c) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kConfigBytesMax));
  ASSIGN_OR_RETURN(const json parsed, ParseStrictJson(text, path));
  JsonReader reader(parsed, path, "");
  std::set<TokenId> eos(c.eos_ids.begin(), c.eos_ids.end());
  AddIds(reader, "eos_token_id", c.vocab, eos);
  c.eos_ids.assign(eos.begin(), eos.end());
  return reader.status();
}

}  // namespace

float ModelConfig::mla_scale() const {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(nope + rope)));
}

int64_t ModelConfig::CountMixer(MixerKind kind) const {
  return std::count_if(layers.begin(), layers.end(),
                       [&](const LayerKind& layer) { return layer.mixer == kind; });
}

int64_t ModelConfig::CountFfn(FfnKind kind) const {
  return std::count_if(layers.begin(), layers.end(),
                       [&](const LayerKind& layer) { return layer.ffn == kind; });
}

StateLayout ModelConfig::ToStateLayout() const {
  StateLayout layout;
  layout.kda_layers = CountMixer(MixerKind::kKda);
  layout.heads = kda_heads;
  layout.dim = kda_dim;
  layout.conv_taps = conv_taps;
  layout.mla_layers = CountMixer(MixerKind::kMla);
  layout.rank = kv_rank;
  layout.rope = rope;
  return layout;
}

absl::StatusOr<ModelConfig> ModelConfig::Parse(std::string_view json_text, std::string_view where) {
  ASSIGN_OR_RETURN(const json parsed, ParseStrictJson(json_text, where));
  return FromJson(parsed, std::string(where));
}

absl::StatusOr<ModelConfig> ModelConfig::Load(const std::string& folder) {
  const std::string path = folder + "/config.json";
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kConfigBytesMax));
  ASSIGN_OR_RETURN(ModelConfig config, Parse(text, path));
  const std::string generation = folder + "/generation_config.json";
  std::error_code ignored;
  if (std::filesystem::exists(generation, ignored)) {
    RETURN_IF_ERROR(AddGenerationConfig(generation, config));
  }
  return config;
}

}  // namespace deltamesh
