// The dimensions of a model that decide how many bytes it and its sequences take. Needs no weights.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "runtime/cache/state_layout.h"

namespace deltamesh {

struct ModelShape {
  std::string family;     // "kimi_k3", "kimi_linear" or "all-MLA"; for people
  StateLayout layout;     // of what a sequence keeps; no recurrent layers in an all-MLA model
  int64_t heads = 0;      // of full attention
  int64_t key_dim = 0;    // per head, without the extra positional width
  int64_t value_dim = 0;  // per head
  int64_t context_tokens = 0;
  int64_t parameters = 0;                       // of the text model
  std::map<std::string, int64_t> weight_bytes;  // as stored, by element type
  int64_t expert_bytes = 0;                     // of them, routed experts: what expert shards hold
  int64_t expert_parameters = 0;                // of routed experts
  // All but routed experts and an embedding table that is only looked up: what a decode step reads and
  // multiplies its tokens with.
  int64_t dense_parameters = 0;
  int64_t dense_bytes = 0;
  int64_t head_parameters = 0;  // of the dense ones, those that give logits: few tokens of a prompt
  int64_t moe_layers = 0;
  int64_t experts = 0;       // per MoE layer
  int64_t top_k = 0;         // of them, for a token
  int64_t expert_width = 0;  // values of a row that goes to them

  int64_t layers() const { return layout.kda_layers + layout.mla_layers; }
  int64_t total_weight_bytes() const;
};

// Reads a config.json of a family that the engine runs, or of a model whose every layer is multi-head
// latent attention (DeepSeek-V3 and its like), for comparison. `path` is the file or its folder.
absl::StatusOr<ModelShape> LoadModelShape(const std::string& path);
// The same from text; `where` names the source in messages.
absl::StatusOr<ModelShape> ParseModelShape(std::string_view json, std::string_view where);

// Kimi K3, for those who have no file at hand.
ModelShape KimiK3Shape();

}  // namespace deltamesh
