#include <cstring>

#include "kernels/base/simd_targets.h"
#include "kernels/conv/conv.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/conv/conv_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Input row of a time counted from the first token; negative times are in the tail.
HWY_INLINE const float* InputRow(const ShortConvParams& p, int64_t time) {
  if (time >= 0) return p.x + time * p.x_stride;
  return p.tail + (p.taps - 1 + time) * p.tail_stride;
}

void ShortConvCpu(const ShortConvParams& p) {
  const DF d;
  for (int64_t t = 0; t < p.tokens; ++t) {
    float* y = p.y + t * p.y_stride;
    ForVectors(p.channel_begin, p.channel_end, [&](int64_t c, int64_t count) HWY_ATTR {
      VF acc = hn::Zero(d);
      for (int64_t s = 0; s < p.taps; ++s) {
        const VF weight = LoadUpTo(p.weight + s * p.weight_stride + c, count);
        acc = hn::MulAdd(weight, LoadUpTo(InputRow(p, t - p.taps + 1 + s) + c, count), acc);
      }
      StoreUpTo(Silu(d, acc), y + c, count);
    });
  }
  if (p.tokens == 0) return;
  // Oldest first: each new entry is read from a row that is not written before it.
  const size_t bytes = static_cast<size_t>(p.channel_end - p.channel_begin) * sizeof(float);
  for (int64_t i = 0; i < p.taps - 1; ++i) {
    const float* row = InputRow(p, p.tokens - p.taps + 1 + i);
    std::memcpy(p.tail + i * p.tail_stride + p.channel_begin, row + p.channel_begin, bytes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(ShortConvCpu);

void ShortConv(const ShortConvParams& p) { HWY_DYNAMIC_DISPATCH(ShortConvCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE
