// Causal depthwise convolution over time, then SiLU (KDA's short convolution, model.md 6.2).
//
// y[t][c] = silu(acc), acc = fma chain over s ascending of weight[c][s] * x[t - taps + 1 + s][c];
// the last tap multiplies the current token. Inputs before the first token come from `tail`.
#pragma once

#include <cstdint>

namespace deltamesh::kernels {

struct ShortConvParams {
  const float* x;  // [tokens, channels], x_stride: raw projections
  int64_t x_stride;
  float* tail;  // [taps - 1, channels], tail_stride: the last inputs, oldest first; updated
  int64_t tail_stride;
  const float* weight;    // [taps][channels]: transposed from the checkpoint's [channels, 1, taps]
  int64_t weight_stride;  // floats between taps
  float* y;               // [tokens, channels], y_stride; must not overlap x
  int64_t y_stride;
  int64_t tokens, taps;
  int64_t channel_begin, channel_end;
};
void ShortConvRef(const ShortConvParams& p);
void ShortConv(const ShortConvParams& p);

}  // namespace deltamesh::kernels
