// What flows between sub-layers: a plain running sum, or Attention Residuals (model.md 9).
//
// Order per layer: AttentionInput, AddAttention, FfnInput, AddFfn; after the last layer Final. Buffers
// come from the step's workspace and live as long as the scope around the stream.
#pragma once

#include <cstdint>

#include "runtime/model/config.h"
#include "runtime/model/step.h"
#include "runtime/model/weights.h"

namespace deltamesh {

class ResidualStream {
 public:
  // `embedding` [tokens, hidden] becomes part of the stream and must stay untouched by others.
  ResidualStream(const ModelConfig& config, const Weights& weights, const Step& step,
                 float* embedding);

  // What enters the norm before the mixer (before the feed-forward) of `layer`: [tokens, hidden]. Valid
  // until the next call.
  const float* AttentionInput(int64_t layer);
  const float* FfnInput(int64_t layer);

  // Adds a sub-layer's output [tokens, hidden].
  void AddAttention(const float* y);
  void AddFfn(const float* y);

  // What enters the final norm, for rows [begin, end): `out` is [end - begin, hidden].
  void Final(int64_t begin, int64_t end, float* out) const;

 private:
  bool attn_res() const { return config_.attn_res_block > 0; }
  // The mixture of all entries and the prefix, for rows [begin, end).
  void Mix(const FloatVector& weight, int64_t begin, int64_t end, float* out) const;
  const float* MixAll(const FloatVector& weight);

  const ModelConfig& config_;
  const Weights& weights_;
  const Step& step_;
  float* prefix_;                    // the running sum since the last entry
  bool restart_ = false;             // the prefix was pushed: the next output replaces it
  float* mixed_ = nullptr;           // attn_res only
  const float** entries_ = nullptr;  // [entry_count_] block entries, the embedding first
  int64_t entry_count_ = 0;
};

}  // namespace deltamesh
