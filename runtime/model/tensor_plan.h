// Which tensors a configuration asks for: names, shapes and element types (model.md 3).
//
// Types are strict. Projections, norms, embeddings: BF16. A_log and dt_bias: F32. Packed experts
// and their scales: U8. Three kinds have two published forms that no key tells apart: convolution
// filters, the KDA output norm and the router bias are all BF16 (Kimi-Linear) or all F32 (K3); the
// form most of a kind's tensors have is expected of all of them. A_log is [1, 1, heads, 1], or [n]
// with n = heads or the next multiple of 128 (zero padding).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/model/checkpoint.h"
#include "runtime/model/config.h"

namespace deltamesh {

struct ExpectedTensor {
  std::string name;  // without "language_model."
  DType dtype = DType::kBf16;
  std::vector<int64_t> shape;
  int64_t parameters = 0;  // values of the model; a packed byte holds two, a scale none

  int64_t bytes() const;
};

// What the configuration leaves open.
struct StorageForms {
  DType conv = DType::kBf16;
  DType o_norm = DType::kBf16;
  DType router_bias = DType::kBf16;
  bool flat_a_log = false;  // [n] instead of [1, 1, heads, 1]
  int64_t a_log_size = 0;   // n

  static StorageForms KimiLinear();
  static StorageForms KimiK3(const ModelConfig& config);
};

std::vector<ExpectedTensor> TensorPlan(const ModelConfig& config, const StorageForms& forms);

// The forms of a stored checkpoint, by majority.
StorageForms DetectForms(const ModelConfig& config, const Checkpoint& checkpoint);

// Every expected tensor is there with its shape and type, and nothing else is. One error, naming
// the file and the first offending tensor.
absl::Status CheckTensors(const ModelConfig& config, const Checkpoint& checkpoint);

// "model.layers.3."
std::string LayerPrefix(int64_t layer);
// "model.layers.3.block_sparse_moe.experts.7.w1.weight"; MXFP4 appends "_packed" and "_scale".
std::string ExpertTensor(int64_t layer, int64_t expert, std::string_view matrix);

}  // namespace deltamesh
