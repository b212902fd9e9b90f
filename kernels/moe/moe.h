// Expert gate, gated activations and the weighted sum of expert outputs (model.md 8).
#pragma once

#include <cstdint>

namespace deltamesh::kernels {

// Bounds of ExpertGate, which keeps a token's scores on the stack.
inline constexpr int64_t kMaxExperts = 4096;
inline constexpr int64_t kMaxExpertGroups = 256;

enum class Activation : uint8_t { kSilu = 0, kSitu = 1 };

// y = act(gate, up), element-wise over [rows, width].
//   kSilu: (g * sigmoid(g)) * u, the product in brackets being Silu of kernels/base/math.h
//   kSitu: ((b * tanh(g / b)) * sigmoid(g)) * (c * tanh(u / c)); linear_beta 0 leaves u as it is
struct GluParams {
  const float* gate;  // [rows, width], stride
  const float* up;    // [rows, width], stride
  int64_t stride;
  Activation activation;
  float beta, linear_beta;
  float* y;  // [rows, width], y_stride; may be gate or up
  int64_t y_stride;
  int64_t rows, width;
};
void GluRef(const GluParams& p);
void Glu(const GluParams& p);

// y = x * sigmoid(gate), element-wise (MLA's output gate). y may be x.
struct SigmoidGateParams {
  const float* x;
  const float* gate;
  float* y;
  int64_t count;
};
void SigmoidGateRef(const SigmoidGateParams& p);
void SigmoidGate(const SigmoidGateParams& p);

// scores = sigmoid(logits); the top_k of scores + bias, ties to the lowest index, ordered by
// descending biased score; weights from the unbiased scores: w = s / (sum over ranks ascending +
// 1e-20) when renormalize and top_k > 1, then w * scale. With groups > top_groups the experts are
// cut into equal runs, a run's score is the sum of its two best biased scores (of its only one when
// it has one), and only the top_groups best runs, ties to the lowest, take part. Softmax: e_i =
// exp(logit_i - max), score_i = e_i / (sum over ascending i). A NaN score is never preferred to a
// number.
struct ExpertGateParams {
  const float* logits;  // [tokens, experts]
  const float* bias;    // [experts] or null
  int64_t tokens, experts, top_k;
  int64_t groups, top_groups;
  bool sigmoid;  // false: softmax over the experts
  bool renormalize;
  bool biased_weights;  // the Kimi-Linear remote code's quirk; normally false
  float scale;
  int32_t* ids;    // [tokens, top_k]
  float* weights;  // [tokens, top_k]
};
void ExpertGate(const ExpertGateParams& p);  // scalar: the reference is the implementation

// y[t][i] = chain over ascending rank r of fma(weights[t][r], rows[t * top_k + r][i], .) from +0.
struct CombineParams {
  const float* rows;     // [tokens * top_k, width]
  const float* weights;  // [tokens, top_k]
  float* y;              // [tokens, width]
  int64_t tokens, top_k, width;
};
void CombineRef(const CombineParams& p);
void Combine(const CombineParams& p);

}  // namespace deltamesh::kernels
