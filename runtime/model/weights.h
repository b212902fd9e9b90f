// All weights of a model in the form the kernels read: matrices packed into panels, vectors as
// float32.
//
// Immutable after loading, so threads may share it. Packed matrices are views into one arena or one
// mapped file owned here; the embedding table stays in the mapped checkpoint file.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/gemm/gemm.h"
#include "runtime/base/ids.h"
#include "runtime/expert/expert_set.h"
#include "runtime/model/arena.h"
#include "runtime/model/checkpoint.h"
#include "runtime/model/config.h"
#include "runtime/model/load_options.h"
#include "runtime/model/packed_store.h"

namespace deltamesh {

using kernels::PackedMatrix;
using FloatVector = std::vector<float>;

struct KdaWeights {
  PackedMatrix q, k, v;                // [kda_width, hidden]
  FloatVector q_conv, k_conv, v_conv;  // [taps][kda_width]: transposed, last tap = current token
  FloatVector a_scale;                 // [heads]: exp(A_log), rounded once from double
  FloatVector dt_bias;                 // [kda_width]
  PackedMatrix f_a;                    // [kda_dim, hidden]
  PackedMatrix f_b;                    // [kda_width, kda_dim]
  PackedMatrix b;                      // [heads, hidden]
  PackedMatrix g;                      // [kda_width, hidden]; full_rank_gate
  PackedMatrix g_a, g_b;               // [kda_dim, hidden], [kda_width, kda_dim]; otherwise
  FloatVector o_norm;                  // [kda_dim]
  PackedMatrix o;                      // [hidden, kda_width]
};

struct MlaWeights {
  PackedMatrix q;         // [heads * (nope + rope), hidden]; q_rank == 0
  PackedMatrix q_a;       // [q_rank, hidden]; otherwise
  FloatVector q_a_norm;   // [q_rank]
  PackedMatrix q_b;       // [heads * (nope + rope), q_rank]
  PackedMatrix kv_a;      // [kv_rank + rope, hidden]
  FloatVector kv_a_norm;  // [kv_rank]
  // W_k transposed, so wk * q_n = q_latent: [heads] of [kv_rank, nope].
  std::vector<PackedMatrix> wk;
  std::vector<PackedMatrix> wv;  // [heads] of [v_dim, kv_rank]
  PackedMatrix g;                // [heads * v_dim, hidden]; mla_gate
  PackedMatrix o;                // [hidden, heads * v_dim]
};

// A gated unit: down(act(gate x, up x)).
struct GluWeights {
  PackedMatrix gate, up;  // [inter, hidden]
  PackedMatrix down;      // [hidden, inter]
};

// Routed experts are in Weights::experts.
struct MoeWeights {
  PackedMatrix gate;         // [experts, hidden]
  FloatVector bias;          // [experts]
  GluWeights shared;         // empty when shared_experts == 0
  PackedMatrix latent_down;  // [latent, hidden]; latent > 0
  FloatVector latent_norm;   // [latent]; latent_norm
  PackedMatrix latent_up;    // [hidden, latent]
};

struct LayerWeights {
  FloatVector input_norm, post_attention_norm;  // [hidden]
  FloatVector attn_res,
      mlp_res;     // [hidden]: norm.weight * proj.weight in float32; attn_res_block > 0
  KdaWeights kda;  // filled by the layer's kinds
  MlaWeights mla;
  GluWeights dense;
  MoeWeights moe;
};

// Rows of the stored table, as stored.
struct EmbeddingTable {
  kernels::WeightFormat format = kernels::WeightFormat::kBf16;  // kBf16 or kF32
  int64_t vocab = 0, hidden = 0;
  const std::byte* data = nullptr;  // [vocab, hidden], any alignment

  // Writes `hidden` floats. `id` must be in [0, vocab).
  void Row(TokenId id, float* out) const;
};

// With LoadOptions::only_experts everything but `experts` is empty.
struct Weights {
  EmbeddingTable embedding;
  std::vector<LayerWeights> layers;  // by 0-based layer
  FloatVector output_res;            // [hidden]: like attn_res, before the final norm
  FloatVector final_norm;            // [hidden]
  PackedMatrix lm_head;              // [vocab, hidden]
  ExpertSet experts;                 // views empty for experts that were not selected

  Arena arena;                                   // holds every PackedMatrix, or
  std::shared_ptr<const PackedFile> file;        // does
  PackedReport packed;                           // where they are and how they got there
  std::shared_ptr<const Checkpoint> checkpoint;  // holds the embedding table

  int64_t packed_bytes = 0;

  int64_t bytes() const { return packed_bytes; }
};

// Checks the whole checkpoint against the configuration first (tensor_plan.h), then packs what was
// asked for, or maps it from options.packed.folder, where the whole model is packed first if it is
// not there yet. `source` is SourceDigest; only that folder needs it. INVALID_ARGUMENT or
// NOT_FOUND name file and tensor, also for values that are not finite.
absl::StatusOr<std::unique_ptr<Weights>> LoadWeights(const ModelConfig& config,
                                                     std::shared_ptr<const Checkpoint> checkpoint,
                                                     const LoadOptions& options,
                                                     const std::string& source = "");

}  // namespace deltamesh
