#include "runtime/model/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/base/status.h"
#include "runtime/base/thread_pool.h"
#include "runtime/model/packer.h"
#include "runtime/model/tensor_plan.h"

namespace deltamesh {
namespace {

// Fills one Weights object from a checkpoint that passed CheckTensors.
class Loader {
 public:
  Loader(const ModelConfig& config, const Checkpoint& checkpoint, WeightWidth width,
         Weights& weights)
      : c_(config), checkpoint_(checkpoint), w_(weights), packer_(checkpoint, width) {}

  // Fills in all small tensors, and the packer with what is to be packed.
  absl::Status Collect(const ExpertSelection& experts, bool only_experts) {
    w_.layers.resize(c_.layers.size());
    if (!only_experts) {
      for (int64_t i = 0; i < c_.layer_count(); ++i) Layer(i);
      Ends();
    }
    Experts(experts);
    w_.packed_bytes = packer_.packed_bytes();
    return status_;
  }

  Packer& packer() { return packer_; }

 private:
  const StoredTensor& Stored(const std::string& name) const {
    const StoredTensor* tensor = checkpoint_.Find(name);
    CHECK(tensor != nullptr, "%s: not in the checkpoint", name);
    return *tensor;
  }

  void Matrix(const std::string& name, PackedMatrix& target) {
    packer_.Add(Stored(name + ".weight"), &target);
  }

  // Values as float32, whatever the shape; empty after an error.
  FloatVector Floats(const std::string& name) {
    const StoredTensor& tensor = Stored(name);
    const int64_t n = tensor.view.elements();
    if (status_.ok()) status_ = CheckFinite(checkpoint_, tensor, 0, n);
    FloatVector values(static_cast<size_t>(n));
    if (tensor.view.dtype == DType::kF32) {
      std::memcpy(values.data(), tensor.view.bytes.data(), tensor.view.bytes.size());
      return values;
    }
    CHECK(tensor.view.dtype == DType::kBf16, "%s: not a float tensor", name);
    for (int64_t i = 0; i < n; ++i) {
      uint16_t bits;
      std::memcpy(&bits, tensor.view.bytes.data() + 2 * i, sizeof(bits));
      values[i] = kernels::Bf16ToFloat(bits);
    }
    return values;
  }

  FloatVector Residual(const std::string& name) {
    FloatVector weight = Floats(name + "_norm.weight");
    const FloatVector proj = Floats(name + "_proj.weight");
    for (size_t i = 0; i < weight.size(); ++i) weight[i] *= proj[i];
    return weight;
  }

  // [channels, 1, taps] to [taps][channels].
  FloatVector ConvFilter(const std::string& name) {
    const FloatVector stored = Floats(name);
    FloatVector filter(stored.size());
    const int64_t channels = c_.kda_width();
    for (int64_t channel = 0; channel < channels; ++channel) {
      for (int64_t tap = 0; tap < c_.conv_taps; ++tap) {
        filter[tap * channels + channel] = stored[channel * c_.conv_taps + tap];
      }
    }
    return filter;
  }

  FloatVector DecayScale(const std::string& name) {
    FloatVector scale = Floats(name);
    scale.resize(static_cast<size_t>(c_.kda_heads));  // the rest is padding
    for (float& a : scale) {
      const float log = a;
      a = static_cast<float>(std::exp(static_cast<double>(log)));
      if (status_.ok() && !std::isfinite(a)) {
        status_ = InvalidArgument("%s: tensor %s: exp(%g) is beyond float32", checkpoint_.folder(),
                                  name, log);
      }
    }
    return scale;
  }

  void Layer(int64_t i) {
    LayerWeights& layer = w_.layers[i];
    const std::string prefix = LayerPrefix(i);
    layer.input_norm = Floats(prefix + "input_layernorm.weight");
    layer.post_attention_norm = Floats(prefix + "post_attention_layernorm.weight");
    if (c_.attn_res_block > 0) {
      layer.attn_res = Residual(prefix + "self_attention_res");
      layer.mlp_res = Residual(prefix + "mlp_res");
    }
    if (c_.layers[i].mixer == MixerKind::kKda) {
      Kda(prefix + "self_attn.", layer.kda);
    } else {
      Mla(prefix + "self_attn.", layer.mla);
    }
    if (c_.layers[i].ffn == FfnKind::kDense) {
      Glu(prefix + "mlp.", layer.dense);
    } else {
      Moe(prefix + "block_sparse_moe.", layer.moe);
    }
  }

  void Kda(const std::string& p, KdaWeights& k) {
    Matrix(p + "q_proj", k.q);
    Matrix(p + "k_proj", k.k);
    Matrix(p + "v_proj", k.v);
    k.q_conv = ConvFilter(p + "q_conv1d.weight");
    k.k_conv = ConvFilter(p + "k_conv1d.weight");
    k.v_conv = ConvFilter(p + "v_conv1d.weight");
    k.a_scale = DecayScale(p + "A_log");
    k.dt_bias = Floats(p + "dt_bias");
    Matrix(p + "f_a_proj", k.f_a);
    Matrix(p + "f_b_proj", k.f_b);
    Matrix(p + "b_proj", k.b);
    if (c_.full_rank_gate) {
      Matrix(p + "g_proj", k.g);
    } else {
      Matrix(p + "g_a_proj", k.g_a);
      Matrix(p + "g_b_proj", k.g_b);
    }
    k.o_norm = Floats(p + "o_norm.weight");
    Matrix(p + "o_proj", k.o);
  }

  void Mla(const std::string& p, MlaWeights& m) {
    if (c_.q_rank > 0) {
      Matrix(p + "q_a_proj", m.q_a);
      m.q_a_norm = Floats(p + "q_a_layernorm.weight");
      Matrix(p + "q_b_proj", m.q_b);
    } else {
      Matrix(p + "q_proj", m.q);
    }
    Matrix(p + "kv_a_proj_with_mqa", m.kv_a);
    m.kv_a_norm = Floats(p + "kv_a_layernorm.weight");
    // Rows per head: `nope` key rows, then `v_dim` value rows.
    const StoredTensor& kv_b = Stored(p + "kv_b_proj.weight");
    m.wk.resize(static_cast<size_t>(c_.heads));
    m.wv.resize(static_cast<size_t>(c_.heads));
    for (int64_t head = 0; head < c_.heads; ++head) {
      const int64_t row = head * (c_.nope + c_.v_dim);
      packer_.AddTransposed(kv_b, row, c_.nope, &m.wk[head]);
      packer_.AddRows(kv_b, row + c_.nope, c_.v_dim, &m.wv[head]);
    }
    if (c_.mla_gate) Matrix(p + "g_proj", m.g);
    Matrix(p + "o_proj", m.o);
  }

  void Glu(const std::string& p, GluWeights& g) {
    Matrix(p + "gate_proj", g.gate);
    Matrix(p + "up_proj", g.up);
    Matrix(p + "down_proj", g.down);
  }

  void Moe(const std::string& p, MoeWeights& m) {
    packer_.AddAsStored(Stored(p + "gate.weight"), &m.gate);
    m.bias = Floats(p + "gate.e_score_correction_bias");
    if (c_.shared_experts > 0) Glu(p + "shared_experts.", m.shared);
    if (c_.latent > 0) {
      Matrix(p + "routed_expert_down_proj", m.latent_down);
      if (c_.latent_norm) m.latent_norm = Floats(p + "routed_expert_norm.weight");
      Matrix(p + "routed_expert_up_proj", m.latent_up);
    }
  }

  // What comes before the first and after the last layer.
  void Ends() {
    const StoredTensor& table = Stored("model.embed_tokens.weight");
    packer_.AddCheck(table);
    w_.embedding.format = table.view.dtype == DType::kF32 ? kernels::WeightFormat::kF32
                                                          : kernels::WeightFormat::kBf16;
    w_.embedding.vocab = c_.vocab;
    w_.embedding.hidden = c_.hidden;
    w_.embedding.data = table.view.bytes.data();
    if (c_.attn_res_block > 0) w_.output_res = Residual("model.output_attn_res");
    w_.final_norm = Floats("model.norm.weight");
    packer_.Add(c_.tied_embeddings ? table : Stored("lm_head.weight"), &w_.lm_head);
  }

  void ExpertMatrix(const std::string& name, PackedMatrix& target) {
    if (c_.experts_mxfp4) {
      packer_.AddMxfp4(Stored(name + "_packed"), Stored(name + "_scale"), &target);
    } else {
      packer_.Add(Stored(name), &target);
    }
  }

  void Experts(const ExpertSelection& selection) {
    ExpertSet& set = w_.experts;
    set.experts = c_.experts;
    set.width = c_.expert_width();
    set.inter = c_.moe_inter;
    set.activation = c_.activation;
    set.beta = c_.act_beta;
    set.linear_beta = c_.act_linear_beta;
    set.layers.resize(c_.layers.size());
    std::vector<bool> wanted(static_cast<size_t>(c_.experts),
                             selection.kind == ExpertSelection::Kind::kAll);
    if (selection.kind == ExpertSelection::Kind::kList) {
      for (const int32_t e : selection.experts) wanted[e] = true;
    }
    for (int64_t i = 0; i < c_.layer_count(); ++i) {
      if (c_.layers[i].ffn != FfnKind::kMoe) continue;
      set.layers[i].resize(static_cast<size_t>(c_.experts));
      for (int64_t e = 0; e < c_.experts; ++e) {
        if (!wanted[e]) continue;
        ExpertMatrix(ExpertTensor(i, e, "w1"), set.layers[i][e].gate);
        ExpertMatrix(ExpertTensor(i, e, "w3"), set.layers[i][e].up);
        ExpertMatrix(ExpertTensor(i, e, "w2"), set.layers[i][e].down);
      }
    }
  }

  const ModelConfig& c_;
  const Checkpoint& checkpoint_;
  Weights& w_;
  Packer packer_;
  absl::Status status_;
};

absl::Status CheckSelection(const ModelConfig& config, const LoadOptions& options) {
  if (options.experts.kind == ExpertSelection::Kind::kList) {
    for (const int32_t e : options.experts.experts) {
      if (e < 0 || e >= config.experts) {
        return InvalidArgument("experts: %d is not one of the model's %d experts (0 to %d)", e,
                               config.experts, config.experts - 1);
      }
    }
  }
  if (options.only_experts && config.CountFfn(FfnKind::kMoe) == 0) {
    return InvalidArgument(
        "experts: the model has no routed experts, so no expert shard is needed");
  }
  return absl::OkStatus();
}

// Finds or makes the packed file and takes this process's part of it into use.
absl::StatusOr<PackedReport> LoadPacked(const ModelConfig& config, const Checkpoint& checkpoint,
                                        const LoadOptions& options, const std::string& source,
                                        ThreadPool& pool, Packer& packer, Weights& weights) {
  Weights whole;  // the plan of the file; nothing is packed into it
  Loader all(config, checkpoint, options.weights, whole);
  PackedTask task;
  task.key = {source, std::string(WeightWidthName(options.weights))};
  task.plan = [&]() -> absl::StatusOr<std::vector<PackedEntry>> {
    RETURN_IF_ERROR(all.Collect({}, /*only_experts=*/false));
    return all.packer().Entries();
  };
  task.build = [&](PackedFileWriter& writer) -> absl::Status {
    RETURN_IF_ERROR(all.packer().RunToFile(pool, writer, options.progress));
    return checkpoint.CheckUnchanged();  // the file gets the name of what was opened
  };
  task.use = [&](std::shared_ptr<const PackedFile> file) -> absl::Status {
    RETURN_IF_ERROR(packer.Attach(pool, *file, options.progress));
    weights.file = std::move(file);
    return absl::OkStatus();
  };
  return UsePackedFile(options, task);
}

// Whether only the folder of packed files is at fault.
bool FolderFailed(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
         absl::IsDeadlineExceeded(status);
}

absl::Status LoadMatrices(const ModelConfig& config, const Checkpoint& checkpoint,
                          const LoadOptions& options, const std::string& source, Packer& packer,
                          Weights& weights) {
  ThreadPool pool(std::max(1, options.threads));
  if (!options.packed.folder.empty()) {
    absl::StatusOr<PackedReport> report =
        LoadPacked(config, checkpoint, options, source, pool, packer, weights);
    if (report.ok()) {
      weights.packed = *std::move(report);
      return absl::OkStatus();
    }
    if (options.packed.required || !FolderFailed(report.status())) return report.status();
    if (options.note) {
      options.note(absl::StrFormat("%s; packing in memory instead", MessageOf(report.status())));
    }
  }
  ASSIGN_OR_RETURN(weights.arena, packer.Run(pool, options.progress));
  return absl::OkStatus();
}

}  // namespace

void EmbeddingTable::Row(TokenId id, float* out) const {
  CHECK(id >= 0 && id < vocab, "token %d of %d", id, vocab);
  if (format == kernels::WeightFormat::kF32) {
    std::memcpy(out, data + int64_t{id} * hidden * 4, static_cast<size_t>(hidden) * 4);
    return;
  }
  const std::byte* row = data + int64_t{id} * hidden * 2;
  for (int64_t i = 0; i < hidden; ++i) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * i, sizeof(bits));
    out[i] = kernels::Bf16ToFloat(bits);
  }
}

absl::StatusOr<std::unique_ptr<Weights>> LoadWeights(const ModelConfig& config,
                                                     std::shared_ptr<const Checkpoint> checkpoint,
                                                     const LoadOptions& options,
                                                     const std::string& source) {
  RETURN_IF_ERROR(CheckSelection(config, options));
  RETURN_IF_ERROR(CheckTensors(config, *checkpoint));
  auto weights = std::make_unique<Weights>();
  Loader loader(config, *checkpoint, options.weights, *weights);
  RETURN_IF_ERROR(loader.Collect(options.experts, options.only_experts));
  RETURN_IF_ERROR(LoadMatrices(config, *checkpoint, options, source, loader.packer(), *weights));
  RETURN_IF_ERROR(checkpoint->CheckUnchanged());
  if (options.only_experts) weights->layers.clear();
  checkpoint->ReleasePages();
  weights->experts.int8_activations = options.activations == Activations::kInt8;
  weights->checkpoint = std::move(checkpoint);
  return weights;
}

}  // namespace deltamesh
