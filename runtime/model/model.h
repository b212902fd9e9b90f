// The forward pass of a Kimi-Linear or Kimi K3 text model (model.md); state enters and leaves as arguments.
//
// The same tokens give the same bits: every result depends on the sequence's own tokens only, not on what
// else is in the call, how the prompt was cut, the number of threads or where experts were computed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/base/ids.h"
#include "runtime/base/thread_pool.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/expert/backend.h"
#include "runtime/expert/expert_set.h"
#include "runtime/model/config.h"
#include "runtime/model/load_options.h"
#include "runtime/model/packed_store.h"

namespace deltamesh {

// Rows of one call. The workspace grows with the largest call seen (about 20 hidden widths a row); callers
// keep their own budget below this.
inline constexpr int64_t kForwardTokensMax = 65536;

// One sequence's part of a step.
struct SequenceChunk {
  SequenceState* state;             // advanced by tokens.size(); blocks must have been reserved
  std::span<const TokenId> tokens;  // at least one, each below the vocabulary size
  // Logits of the last `logits` tokens (0: none) go to `out` [logits, vocab].
  int64_t logits = 0;
  float* out = nullptr;
  // Called on the calling thread, layers ascending, as soon as the state of layer `layer` (0-based layer of
  // the model) is final for this chunk; the rest of the layer and the state's position come later. May be
  // null.
  std::function<void(int64_t layer)> layer_done;
  // Null, or an own state whose slab takes S and conv as they are after the first `copy_after` tokens, where
  // the state stands at a multiple of 64; its position and blocks are left to the caller (Restore).
  SequenceState* copy = nullptr;
  int64_t copy_after = 0;  // below tokens.size()
};

class Model {
 public:
  // Reads and checks everything first: a missing, extra, mis-shaped or truncated tensor is one error that
  // names file and tensor.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& folder,
                                                     const LoadOptions& options);
  ~Model();

  const ModelConfig& config() const;
  const StateLayout& state_layout() const;
  const ExpertSet& experts() const;
  const std::string& digest() const;  // hex SHA-256, see digest.h
  int64_t weight_bytes() const;       // bytes of packed weights
  const PackedReport& packed() const;

  // Advances every chunk's sequence. The batch may hold any mix of prompt chunks and single tokens, in all
  // at most kForwardTokensMax; a sequence appears at most once. Fails only as the experts fail: then the
  // chunks' states are undefined and must be dropped. One call at a time per model object.
  absl::Status Forward(std::span<SequenceChunk> batch, ExpertBackend& experts, ThreadPool& pool);

 private:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltamesh
