// Which Highway targets a kernel is compiled for. Include before any hwy header.
//
// Only targets with a fused multiply-add and vectors of a fixed size: the law of one rounding per
// multiply-add excludes the others, and the kernels keep arrays of vectors.
#pragma once

#ifdef HWY_DISABLED_TARGETS
#error "kernels/base/simd_targets.h must come before every hwy header"
#endif
#define HWY_DISABLED_TARGETS                                                                     \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_PPC8 | \
   HWY_WASM | HWY_WASM_EMU256 | HWY_EMU128 | HWY_SCALAR)
