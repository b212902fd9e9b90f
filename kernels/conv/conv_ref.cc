#include <cmath>

#include "kernels/base/math.h"
#include "kernels/conv/conv.h"

namespace deltamesh::kernels {
namespace {

// The input of channel c at a time counted from the first token; negative times are in the tail.
float InputAt(const ShortConvParams& p, int64_t time, int64_t c) {
  if (time >= 0) return p.x[time * p.x_stride + c];
  return p.tail[(p.taps - 1 + time) * p.tail_stride + c];
}

}  // namespace

void ShortConvRef(const ShortConvParams& p) {
  for (int64_t c = p.channel_begin; c < p.channel_end; ++c) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      float acc = 0.0f;
      for (int64_t s = 0; s < p.taps; ++s) {
        acc = std::fma(p.weight[s * p.weight_stride + c], InputAt(p, t - p.taps + 1 + s, c), acc);
      }
      p.y[t * p.y_stride + c] = Silu(acc);
    }
    // Oldest first: each new entry is read from a place that is not written before it.
    for (int64_t i = 0; i < p.taps - 1; ++i) {
      p.tail[i * p.tail_stride + c] = InputAt(p, p.tokens - p.taps + 1 + i, c);
    }
  }
}

}  // namespace deltamesh::kernels
