#include "runtime/model/residual_stream.h"

#include <algorithm>

#include "kernels/residual/residual.h"
#include "runtime/base/status.h"
#include "runtime/model/project.h"
#include "runtime/model/rows.h"

namespace deltamesh {

ResidualStream::ResidualStream(const ModelConfig& config, const Weights& weights, const Step& step,
                               float* embedding)
    : config_(config), weights_(weights), step_(step), prefix_(embedding) {
  if (!attn_res()) return;
  const int64_t entries =
      (config.layer_count() + config.attn_res_block - 1) / config.attn_res_block;
  CHECK(entries < kernels::kMaxSources, "%d layers in blocks of %d make more sources than %d",
        config.layer_count(), config.attn_res_block, kernels::kMaxSources);
  entries_ = step.workspace.Take<const float*>(entries);
  mixed_ = step.workspace.Floats(step.tokens * config.hidden);
}

void ResidualStream::Mix(const FloatVector& weight, int64_t begin, int64_t end, float* out) const {
  const int64_t dim = config_.hidden;
  const float* sources[kernels::kMaxSources];
  for (int64_t j = 0; j < entry_count_; ++j) sources[j] = entries_[j] + begin * dim;
  sources[entry_count_] = prefix_ + begin * dim;
  kernels::AttnRes({.sources = sources,
                    .count = entry_count_ + 1,
                    .weight = weight.data(),
                    .eps = config_.rms_eps,
                    .out = out,
                    .tokens = end - begin,
                    .dim = dim});
}

const float* ResidualStream::MixAll(const FloatVector& weight) {
  const int64_t dim = config_.hidden;
  step_.pool.ParallelFor(
      step_.tokens, RowGrain(3 * (entry_count_ + 1) * dim),
      [&](int64_t begin, int64_t end) { Mix(weight, begin, end, mixed_ + begin * dim); });
  return mixed_;
}

const float* ResidualStream::AttentionInput(int64_t layer) {
  if (!attn_res()) return prefix_;
  // Layer 0 has no entries yet and sees the embedding as it is.
  const float* in =
      entry_count_ == 0 ? prefix_ : MixAll(weights_.layers[static_cast<size_t>(layer)].attn_res);
  if (layer % config_.attn_res_block == 0) {
    entries_[entry_count_++] = prefix_;
    prefix_ = step_.workspace.Floats(step_.tokens * config_.hidden);
    restart_ = true;
  }
  return in;
}

void ResidualStream::AddAttention(const float* y) {
  if (restart_) {
    std::copy_n(y, step_.tokens * config_.hidden, prefix_);
    restart_ = false;
    return;
  }
  AddRows(step_.pool, step_.tokens, config_.hidden, y, prefix_);
}

const float* ResidualStream::FfnInput(int64_t layer) {
  CHECK(!restart_, "layer %d: the mixer's output was not added", layer);
  return attn_res() ? MixAll(weights_.layers[static_cast<size_t>(layer)].mlp_res) : prefix_;
}

void ResidualStream::AddFfn(const float* y) {
  AddRows(step_.pool, step_.tokens, config_.hidden, y, prefix_);
}

void ResidualStream::Final(int64_t begin, int64_t end, float* out) const {
  if (attn_res()) {
    Mix(weights_.output_res, begin, end, out);
  } else {
    std::copy_n(prefix_ + begin * config_.hidden, (end - begin) * config_.hidden, out);
  }
}

}  // namespace deltamesh
