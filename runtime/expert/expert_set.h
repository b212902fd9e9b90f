// The packed weights of routed experts that this process holds.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/moe/moe.h"

namespace deltamesh {

struct ExpertWeights {
  kernels::PackedMatrix gate, up, down;  // w1 [inter, width], w3 [inter, width], w2 [width, inter]
};

// Views into memory owned by the model's weights. Empty views mark experts held elsewhere.
struct ExpertSet {
  int64_t experts = 0;  // per MoE layer, whole model
  int64_t width = 0;    // values per row in and out
  int64_t inter = 0;
  kernels::Activation activation = kernels::Activation::kSilu;
  float beta = 1, linear_beta = 0;
  bool int8_activations = false;  // quantise the inputs of 8-bit and MXFP4 matrices
  std::vector<std::vector<ExpertWeights>> layers;  // [model layer][expert]; empty for dense layers
};

}  // namespace deltamesh
