#include "runtime/model/tensor_plan.h"

#include <algorithm>
#include <set>

#include "kernels/base/types.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int64_t kALogPad = 128;

// Collects the tensors of one model.
class Planner {
 public:
  Planner(const ModelConfig& config, const StorageForms& forms) : c_(config), forms_(forms) {}

  std::vector<ExpectedTensor> Run() {
    Add("model.embed_tokens.weight", DType::kBf16, {c_.vocab, c_.hidden});
    if (!c_.tied_embeddings) Add("lm_head.weight", DType::kBf16, {c_.vocab, c_.hidden});
    Add("model.norm.weight", DType::kBf16, {c_.hidden});
    if (c_.attn_res_block > 0) Residual("model.output_attn_res");
    for (int64_t i = 0; i < c_.layer_count(); ++i) Layer(i);
    return std::move(tensors_);
  }

 private:
  void Add(std::string name, DType dtype, std::vector<int64_t> shape) {
    int64_t values = 1;
    for (const int64_t size : shape) values *= size;
    tensors_.push_back({std::move(name), dtype, std::move(shape), values});
  }
  void Matrix(const std::string& name, int64_t rows, int64_t cols) {
    Add(name + ".weight", DType::kBf16, {rows, cols});
  }
  void Residual(const std::string& name) {
    Add(name + "_norm.weight", DType::kBf16, {c_.hidden});
    Add(name + "_proj.weight", DType::kBf16, {1, c_.hidden});
  }

  void Layer(int64_t i) {
    const std::string prefix = LayerPrefix(i);
    Add(prefix + "input_layernorm.weight", DType::kBf16, {c_.hidden});
    Add(prefix + "post_attention_layernorm.weight", DType::kBf16, {c_.hidden});
    if (c_.attn_res_block > 0) {
      Residual(prefix + "self_attention_res");
      Residual(prefix + "mlp_res");
    }
    if (c_.layers[i].mixer == MixerKind::kKda) {
      Kda(prefix + "self_attn.");
    } else {
      Mla(prefix + "self_attn.");
    }
    if (c_.layers[i].ffn == FfnKind::kDense) {
      Glu(prefix + "mlp.", c_.dense_inter);
    } else {
      Moe(i, prefix + "block_sparse_moe.");
    }
  }

  void Kda(const std::string& p) {
    const int64_t width = c_.kda_width();
    for (const char* stream : {"q", "k", "v"}) {
      Matrix(p + stream + "_proj", width, c_.hidden);
      Add(p + stream + "_conv1d.weight", forms_.conv, {width, 1, c_.conv_taps});
    }
    if (forms_.flat_a_log) {
      Add(p + "A_log", DType::kF32, {forms_.a_log_size});
    } else {
      Add(p + "A_log", DType::kF32, {1, 1, c_.kda_heads, 1});
    }
    tensors_.back().parameters = c_.kda_heads;
    Add(p + "dt_bias", DType::kF32, {width});
    Matrix(p + "f_a_proj", c_.kda_dim, c_.hidden);
    Matrix(p + "f_b_proj", width, c_.kda_dim);
    Matrix(p + "b_proj", c_.kda_heads, c_.hidden);
    if (c_.full_rank_gate) {
      Matrix(p + "g_proj", width, c_.hidden);
    } else {
      Matrix(p + "g_a_proj", c_.kda_dim, c_.hidden);
      Matrix(p + "g_b_proj", width, c_.kda_dim);
    }
    Add(p + "o_norm.weight", forms_.o_norm, {c_.kda_dim});
    Matrix(p + "o_proj", c_.hidden, width);
  }

  void Mla(const std::string& p) {
    const int64_t query = c_.heads * (c_.nope + c_.rope);
    if (c_.q_rank > 0) {
      Matrix(p + "q_a_proj", c_.q_rank, c_.hidden);
      Add(p + "q_a_layernorm.weight", DType::kBf16, {c_.q_rank});
      Matrix(p + "q_b_proj", query, c_.q_rank);
    } else {
      Matrix(p + "q_proj", query, c_.hidden);
    }
    Matrix(p + "kv_a_proj_with_mqa", c_.kv_rank + c_.rope, c_.hidden);
    Add(p + "kv_a_layernorm.weight", DType::kBf16, {c_.kv_rank});
    Matrix(p + "kv_b_proj", c_.heads * (c_.nope + c_.v_dim), c_.kv_rank);
    if (c_.mla_gate) Matrix(p + "g_proj", c_.heads * c_.v_dim, c_.hidden);
    Matrix(p + "o_proj", c_.hidden, c_.heads * c_.v_dim);
  }

  void Glu(const std::string& p, int64_t inter) {
    Matrix(p + "gate_proj", inter, c_.hidden);
    Matrix(p + "up_proj", inter, c_.hidden);
    Matrix(p + "down_proj", c_.hidden, inter);
  }

  void Moe(int64_t layer, const std::string& p) {
    Matrix(p + "gate", c_.experts, c_.hidden);
    Add(p + "gate.e_score_correction_bias", forms_.router_bias, {c_.experts});
    if (c_.shared_experts > 0) Glu(p + "shared_experts.", c_.shared_inter());
    if (c_.latent > 0) {
      Matrix(p + "routed_expert_down_proj", c_.latent, c_.hidden);
      if (c_.latent_norm) Add(p + "routed_expert_norm.weight", DType::kBf16, {c_.latent});
      Matrix(p + "routed_expert_up_proj", c_.hidden, c_.latent);
    }
    for (int64_t e = 0; e < c_.experts; ++e) {
      ExpertMatrix(ExpertTensor(layer, e, "w1"), c_.moe_inter, c_.expert_width());
      ExpertMatrix(ExpertTensor(layer, e, "w3"), c_.moe_inter, c_.expert_width());
      ExpertMatrix(ExpertTensor(layer, e, "w2"), c_.expert_width(), c_.moe_inter);
    }
  }

  void ExpertMatrix(const std::string& name, int64_t rows, int64_t cols) {
    if (!c_.experts_mxfp4) return Add(name, DType::kBf16, {rows, cols});
    Add(name + "_packed", DType::kU8, {rows, cols / 2});
    tensors_.back().parameters = rows * cols;
    Add(name + "_scale", DType::kU8, {rows, cols / kernels::kMxBlock});
    tensors_.back().parameters = 0;
  }

  const ModelConfig& c_;
  const StorageForms& forms_;
  std::vector<ExpectedTensor> tensors_;
};

std::string Place(const Checkpoint& checkpoint, const StoredTensor& stored) {
  return absl::StrFormat("%s/%s: tensor %s", checkpoint.folder(), stored.file, stored.full_name);
}

absl::Status CheckOne(const ExpectedTensor& expected, const Checkpoint& checkpoint,
                      const StoredTensor& stored) {
  if (stored.view.dtype != expected.dtype) {
    return InvalidArgument("%s: dtype is %s, %s is required", Place(checkpoint, stored),
                           DTypeName(stored.view.dtype), DTypeName(expected.dtype));
  }
  if (stored.view.shape != expected.shape) {
    return InvalidArgument("%s: shape is %s, config.json asks for %s", Place(checkpoint, stored),
                           ShapeText(stored.view.shape), ShapeText(expected.shape));
  }
  return absl::OkStatus();
}

absl::Status MissingError(const Checkpoint& checkpoint, const ExpectedTensor& first,
                          int64_t count) {
  const std::string files =
      checkpoint.files().size() == 1
          ? checkpoint.files()[0]
          : absl::StrFormat("%s .. %s", checkpoint.files().front(), checkpoint.files().back());
  return NotFound(
      "%s: tensor %s (%s %s) is missing from %s, %d missing in all; config.json asks for it",
      checkpoint.folder(), first.name, DTypeName(first.dtype), ShapeText(first.shape), files,
      count);
}

// Votes of a kind of tensors for F32.
struct Vote {
  int64_t f32 = 0, bf16 = 0;

  void Count(const StoredTensor* stored) {
    if (stored == nullptr) return;
    f32 += stored->view.dtype == DType::kF32;
    bf16 += stored->view.dtype == DType::kBf16;
  }
  DType Winner() const { return f32 > bf16 ? DType::kF32 : DType::kBf16; }
};

}  // namespace

int64_t ExpectedTensor::bytes() const {
  int64_t count = DTypeBytes(dtype);
  for (const int64_t size : shape) count *= size;
  return count;
}

std::string LayerPrefix(int64_t layer) { return absl::StrFormat("model.layers.%d.", layer); }

std::string ExpertTensor(int64_t layer, int64_t expert, std::string_view matrix) {
  return absl::StrFormat("model.layers.%d.block_sparse_moe.experts.%d.%s.weight", layer, expert,
                         matrix);
}

StorageForms StorageForms::KimiLinear() { return {}; }

StorageForms StorageForms::KimiK3(const ModelConfig& config) {
  const int64_t padded = (config.kda_heads + kALogPad - 1) / kALogPad * kALogPad;
  return {DType::kF32, DType::kF32, DType::kF32, true, padded};
}

std::vector<ExpectedTensor> TensorPlan(const ModelConfig& config, const StorageForms& forms) {
  return Planner(config, forms).Run();
}

StorageForms DetectForms(const ModelConfig& config, const Checkpoint& checkpoint) {
  Vote conv, o_norm, bias;
  int64_t flat = 0, four = 0, exact = 0;
  for (int64_t i = 0; i < config.layer_count(); ++i) {
    const std::string prefix = LayerPrefix(i);
    for (const char* stream : {"q", "k", "v"}) {
      conv.Count(checkpoint.Find(prefix + "self_attn." + stream + "_conv1d.weight"));
    }
    o_norm.Count(checkpoint.Find(prefix + "self_attn.o_norm.weight"));
    bias.Count(checkpoint.Find(prefix + "block_sparse_moe.gate.e_score_correction_bias"));
    if (const StoredTensor* a_log = checkpoint.Find(prefix + "self_attn.A_log"); a_log != nullptr) {
      const auto& shape = a_log->view.shape;
      ++(shape.size() == 1 ? flat : four);
      exact += shape.size() == 1 && shape[0] == config.kda_heads;
    }
  }
  StorageForms forms{conv.Winner(), o_norm.Winner(), bias.Winner(), flat > four, 0};
  if (forms.flat_a_log) {
    forms.a_log_size =
        exact > flat - exact ? config.kda_heads : StorageForms::KimiK3(config).a_log_size;
  }
  return forms;
}

absl::Status CheckTensors(const ModelConfig& config, const Checkpoint& checkpoint) {
  const std::vector<ExpectedTensor> plan = TensorPlan(config, DetectForms(config, checkpoint));
  std::set<std::string_view> expected_names;
  const ExpectedTensor* first_missing = nullptr;
  int64_t missing = 0;
  for (const ExpectedTensor& expected : plan) {
    expected_names.insert(expected.name);
    const StoredTensor* stored = checkpoint.Find(expected.name);
    if (stored != nullptr) {
      RETURN_IF_ERROR(CheckOne(expected, checkpoint, *stored));
    } else if (++missing == 1) {
      first_missing = &expected;
    }
  }
  if (missing > 0) return MissingError(checkpoint, *first_missing, missing);
  for (const auto& [name, stored] : checkpoint.tensors()) {
    if (!expected_names.contains(name)) {
      return InvalidArgument("%s: is not part of the model config.json describes",
                             Place(checkpoint, stored));
    }
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
