// What config.json says about a Kimi-Linear or Kimi K3 text model (model.md 2).
//
// Features come from keys, never from the family name: any mix of them that the keys can express is
// a valid model here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/moe/moe.h"
#include "runtime/base/ids.h"
#include "runtime/cache/state_layout.h"

namespace deltamesh {

enum class MixerKind : uint8_t { kKda, kMla };
enum class FfnKind : uint8_t { kDense, kMoe };

// Not configurable in the published models: the two latent norms of MLA keep their class default,
// and the L2 norm of KDA has its own.
inline constexpr float kLatentNormEps = 1e-6f;
inline constexpr float kL2NormEps = 1e-6f;

struct LayerKind {
  MixerKind mixer = MixerKind::kKda;
  FfnKind ffn = FfnKind::kDense;
  int64_t mixer_index = 0;  // among the layers with the same mixer: the layer index in StateLayout
};

// A plain value; immutable once loaded.
struct ModelConfig {
  std::string family;  // "kimi_k3" when text_config is nested, else "kimi_linear"; for people

  int64_t vocab = 0;
  int64_t hidden = 0;
  float rms_eps = 0;
  std::vector<LayerKind> layers;  // by 0-based layer
  int64_t context_tokens = 0;     // longest sequence the model was made for
  bool tied_embeddings = false;   // lm_head is the embedding table

  TokenId bos_id = -1;  // -1: none named
  TokenId pad_id = -1;
  std::vector<TokenId> eos_ids;  // config.json and generation_config.json together, ascending

  // KDA. Key and value width are the same.
  int64_t kda_heads = 0;
  int64_t kda_dim = 0;
  int64_t conv_taps = 0;
  bool full_rank_gate = false;  // one g_proj instead of g_a_proj and g_b_proj
  bool bounded_decay = false;
  float decay_lower_bound = 0;  // per token, negative; used when bounded

  // MLA. No positions.
  int64_t heads = 0;
  int64_t q_rank = 0;  // 0: direct query projection
  int64_t kv_rank = 0;
  int64_t nope = 0;  // per head: query and key width from the latent
  int64_t rope = 0;  // per head: extra query and key width (not rotated)
  int64_t v_dim = 0;
  bool mla_gate = false;

  // Feed-forward.
  kernels::Activation activation = kernels::Activation::kSilu;
  float act_beta = 1;
  float act_linear_beta = 0;  // 0: the linear part is not bounded
  int64_t dense_inter = 0;
  int64_t experts = 0;  // 0: no MoE layers
  int64_t top_k = 0;
  int64_t shared_experts = 0;  // stored fused as one of width shared_experts * moe_inter; may be 0
  int64_t moe_inter = 0;
  int64_t latent = 0;  // width in which routed experts live; 0: hidden
  bool latent_norm = false;
  bool experts_mxfp4 = false;
  bool sigmoid_scores = true;  // false: softmax
  bool renormalize = true;
  float route_scale = 1;
  int64_t expert_groups = 1;
  int64_t top_groups = 1;
  bool biased_router_weights = false;  // the remote code's quirk (model.md 8.2); not in config.json

  int64_t attn_res_block = 0;  // 0: plain residual

  int64_t layer_count() const { return static_cast<int64_t>(layers.size()); }
  int64_t kda_width() const { return kda_heads * kda_dim; }
  int64_t expert_width() const { return latent > 0 ? latent : hidden; }
  int64_t shared_inter() const { return shared_experts * moe_inter; }
  float mla_scale() const;  // (nope + rope)^-1/2
  int64_t CountMixer(MixerKind kind) const;
  int64_t CountFfn(FfnKind kind) const;

  StateLayout ToStateLayout() const;

  // Reads config.json, and generation_config.json if there is one. INVALID_ARGUMENT names file, key
  // and value; NOT_FOUND when config.json is not there.
  static absl::StatusOr<ModelConfig> Load(const std::string& folder);
  // The same from text. `where` names the source in messages.
  static absl::StatusOr<ModelConfig> Parse(std::string_view json, std::string_view where);
};

}  // namespace deltamesh
