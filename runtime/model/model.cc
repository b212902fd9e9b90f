#include "runtime/model/model.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/model/checkpoint.h"
#include "runtime/model/digest.h"
#include "runtime/model/glu_layer.h"
#include "runtime/model/kda_layer.h"
#include "runtime/model/mla_layer.h"
#include "runtime/model/moe_layer.h"
#include "runtime/model/project.h"
#include "runtime/model/residual_stream.h"
#include "runtime/model/rows.h"
#include "runtime/model/step.h"
#include "runtime/model/weights.h"
#include "runtime/model/workspace.h"

namespace deltamesh {

struct Model::Impl {
  ModelConfig config;
  StateLayout layout;
  std::string digest;
  bool only_experts = false;
  bool int8 = false;
  std::unique_ptr<Weights> weights;
  Workspace workspace;
  std::vector<StepChunk> chunks;  // of the running call

  int64_t AcceptBatch(std::span<SequenceChunk> batch);
  void Embed(std::span<SequenceChunk> batch, const Step& step, float* rows) const;
  void Mixer(int64_t layer, const Step& step, const float* x, float* out) const;
  absl::Status Ffn(int64_t layer, ExpertBackend& experts, const Step& step, const float* x,
                   float* out) const;
  void Logits(std::span<SequenceChunk> batch, const Step& step, const ResidualStream& stream) const;
  absl::Status Run(std::span<SequenceChunk> batch, ExpertBackend& experts, ThreadPool& pool);
};

// Checks the batch, lays its chunks out as rows, and returns how many rows there are.
int64_t Model::Impl::AcceptBatch(std::span<SequenceChunk> batch) {
  chunks.clear();
  int64_t rows = 0;
  for (const SequenceChunk& c : batch) {
    CHECK(c.state != nullptr, "a chunk without a sequence");
    const auto tokens = static_cast<int64_t>(c.tokens.size());
    const int64_t start = c.state->position();
    CHECK(tokens > 0, "a chunk without tokens");
    CHECK(c.state->layout() == layout, "a state of another model");
    CHECK(static_cast<int64_t>(c.state->blocks().size()) * kBlockTokens >= start + tokens,
          "%d blocks reserved for %d positions", c.state->blocks().size(), start + tokens);
    CHECK(c.logits >= 0 && c.logits <= tokens && (c.logits == 0 || c.out != nullptr),
          "%d logits of %d tokens", c.logits, tokens);
    for (const TokenId id : c.tokens) {
      CHECK(id >= 0 && id < config.vocab, "token %d of %d", id, config.vocab);
    }
    for (const StepChunk& other : chunks) {
      CHECK(other.state != c.state, "a sequence twice in one batch");
      CHECK(c.copy == nullptr || other.copy != c.copy, "a copy twice in one batch");
    }
    if (c.copy != nullptr) {
      CHECK(c.copy_after > 0 && c.copy_after < tokens && (start + c.copy_after) % kBlockTokens == 0,
            "a copy after %d of %d tokens from %d on", c.copy_after, tokens, start);
      CHECK(c.copy->layout() == layout, "a copy of another model's");
    }
    chunks.push_back({c.state, rows, tokens, start, c.copy, c.copy_after});
    rows += tokens;
  }
  CHECK(rows > 0 && rows <= kForwardTokensMax, "%d tokens in one call, at most %d", rows,
        kForwardTokensMax);
  return rows;
}

void Model::Impl::Embed(std::span<SequenceChunk> batch, const Step& step, float* rows) const {
  for (size_t i = 0; i < batch.size(); ++i) {
    float* out = rows + step.chunks[i].first * config.hidden;
    for (const TokenId id : batch[i].tokens) {
      weights->embedding.Row(id, out);
      out += config.hidden;
    }
  }
}

void Model::Impl::Mixer(int64_t layer, const Step& step, const float* x, float* out) const {
  const LayerKind& kind = config.layers[static_cast<size_t>(layer)];
  const LayerWeights& w = weights->layers[static_cast<size_t>(layer)];
  if (kind.mixer == MixerKind::kKda) {
    KdaLayer(config, w.kda, kind.mixer_index, step, x, out);
  } else {
    MlaLayer(config, w.mla, kind.mixer_index, step, x, out);
  }
}

absl::Status Model::Impl::Ffn(int64_t layer, ExpertBackend& experts, const Step& step,
                              const float* x, float* out) const {
  const LayerWeights& w = weights->layers[static_cast<size_t>(layer)];
  if (config.layers[static_cast<size_t>(layer)].ffn == FfnKind::kMoe) {
    return MoeLayer(config, w.moe, layer, experts, step, x, out);
  }
  GluLayer(config, w.dense, step, x, out);
  return absl::OkStatus();
}

// The head runs only over the rows that were asked for, all of them at once: it is the largest matrix.
void Model::Impl::Logits(std::span<SequenceChunk> batch, const Step& step,
                         const ResidualStream& stream) const {
  const int64_t hidden = config.hidden, vocab = config.vocab;
  int64_t rows = 0, askers = 0;
  for (const SequenceChunk& c : batch) {
    rows += c.logits;
    askers += c.logits > 0 ? 1 : 0;
  }
  if (rows == 0) return;
  Workspace::Scope scope(step.workspace);
  float* x = step.workspace.Floats(rows * hidden);
  float* y = askers > 1 ? step.workspace.Floats(rows * vocab) : nullptr;
  int64_t row = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].logits == 0) continue;
    const int64_t end = step.chunks[i].first + step.chunks[i].tokens;
    stream.Final(end - batch[i].logits, end, x + row * hidden);
    row += batch[i].logits;
    if (askers == 1) y = batch[i].out;
  }
  NormRows(step.pool, rows, hidden, x, weights->final_norm.data(), config.rms_eps, x);
  Project(step, rows, x, weights->lm_head, y);
  if (askers == 1) return;
  for (const SequenceChunk& c : batch) {
    std::copy_n(y, c.logits * vocab, c.out);
    y += c.logits * vocab;
  }
}

absl::Status Model::Impl::Run(std::span<SequenceChunk> batch, ExpertBackend& experts,
                              ThreadPool& pool) {
  const int64_t rows = AcceptBatch(batch);
  const int64_t hidden = config.hidden;
  Workspace::Scope scope(workspace);
  const Step step{chunks, rows, pool, workspace, int8};
  float* embedding = workspace.Floats(rows * hidden);
  float* x = workspace.Floats(rows * hidden);  // a sub-layer's input, after its norm
  float* y = workspace.Floats(rows * hidden);  // its output
  Embed(batch, step, embedding);
  ResidualStream stream(config, *weights, step, embedding);

  for (int64_t layer = 0; layer < config.layer_count(); ++layer) {
    const LayerWeights& w = weights->layers[static_cast<size_t>(layer)];
    NormRows(pool, rows, hidden, stream.AttentionInput(layer), w.input_norm.data(), config.rms_eps,
             x);
    Mixer(layer, step, x, y);
    for (const SequenceChunk& c : batch) {
      if (c.layer_done) c.layer_done(layer);
    }
    stream.AddAttention(y);
    NormRows(pool, rows, hidden, stream.FfnInput(layer), w.post_attention_norm.data(),
             config.rms_eps, x);
    RETURN_IF_ERROR(Ffn(layer, experts, step, x, y));
    stream.AddFfn(y);
  }
  Logits(batch, step, stream);
  for (const StepChunk& c : chunks) c.state->Advance(c.tokens);
  return absl::OkStatus();
}

namespace {

// What changes nothing is not what was meant.
absl::Status CheckActivations(const ModelConfig& config, const LoadOptions& options) {
  if (options.activations == Activations::kFloat || options.weights == WeightWidth::k8bit ||
      config.experts_mxfp4) {
    return absl::OkStatus();
  }
  return InvalidArgument(
      "activations: int8 is for 8-bit and MXFP4 matrices, and this model would have neither; add "
      "--weights 8bit, or leave activations at float");
}

}  // namespace

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& folder,
                                                   const LoadOptions& options) {
  auto impl = std::make_unique<Impl>();
  ASSIGN_OR_RETURN(impl->config, ModelConfig::Load(folder));
  RETURN_IF_ERROR(CheckActivations(impl->config, options));
  ASSIGN_OR_RETURN(std::shared_ptr<const Checkpoint> checkpoint, Checkpoint::Open(folder));
  ASSIGN_OR_RETURN(const std::string source, SourceDigest(*checkpoint));
  ASSIGN_OR_RETURN(const std::string digest, RememberedModelDigest(*checkpoint, source, options));
  ASSIGN_OR_RETURN(impl->weights, LoadWeights(impl->config, checkpoint, options, source));
  impl->digest = ServedDigest(digest, options.weights, options.activations);
  impl->layout = impl->config.ToStateLayout();
  impl->only_experts = options.only_experts;
  impl->int8 = options.activations == Activations::kInt8;
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

const ModelConfig& Model::config() const { return impl_->config; }
const StateLayout& Model::state_layout() const { return impl_->layout; }
const ExpertSet& Model::experts() const { return impl_->weights->experts; }
const std::string& Model::digest() const { return impl_->digest; }
int64_t Model::weight_bytes() const { return impl_->weights->bytes(); }
const PackedReport& Model::packed() const { return impl_->weights->packed; }

absl::Status Model::Forward(std::span<SequenceChunk> batch, ExpertBackend& experts,
                            ThreadPool& pool) {
  CHECK(!impl_->only_experts, "only experts were loaded; this process cannot run the model");
  return impl_->Run(batch, experts, pool);
}

}  // namespace deltamesh
