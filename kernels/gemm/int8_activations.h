// y = x * W^T in integers: rows of x are quantised to 8 bits per block of 32 columns first, and meet
// weights that are integers times a scale already (kInt8, kMxfp4).
//
// The law. A block of a row has amax, the largest magnitude of its 32 values, and
//   amax below kInt8Least:    scale xs = +0, all codes 0
//   NaN or infinity in it:    scale xs = NaN, all codes 0, so that every output of the row is NaN
//   otherwise:                xs = amax / 127, code = x * (127 / amax) rounded to nearest, ties to
//                             even; each operation one float32 operation. Codes lie in [-127, 127].
// A weight block has integers and a scale ws: the code and scale of kInt8; of kMxfp4 twice the value
// of the code and half the scale (exact for all scales). Then y[t][o] is one chain over ascending
// blocks from +0:
//   y = fma(float(isum), xs * ws, y),  isum = sum of code * integer over the block.
// isum is exact in int32 and float, so its order is free, and the bits depend neither on tokens,
// panels and threads nor on the instruction set.
//
// A quantised row is Int8RowBytes(cols) bytes: cols codes, cols / 32 scales (float), and
// cols / 32 offsets (int32): -128 times the block's sum of codes, which takes a bias of 128 out of
// isum where products want one side unsigned.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gemm/gemm.h"

namespace deltamesh::kernels {

// Whether matrices of this format can be multiplied in integers.
inline bool TakesInt8(WeightFormat format) {
  return format == WeightFormat::kInt8 || format == WeightFormat::kMxfp4;
}

// `cols` is a multiple of 32.
constexpr int64_t Int8RowBytes(int64_t cols) { return cols / kMxBlock * (kMxBlock + 8); }

struct QuantizeParams {
  const float* x;  // [tokens, cols], x_stride floats between rows
  int64_t x_stride;
  std::byte* rows;  // [tokens][Int8RowBytes(cols)], aligned to 8
  int64_t tokens, cols;
  int64_t block_begin, block_end;  // only these blocks of 32 columns are read and written
};
void QuantizeRowsRef(const QuantizeParams& p);
void QuantizeRows(const QuantizeParams& p);

struct Int8GemmParams {
  const std::byte* x;  // [tokens][Int8RowBytes(w.cols)], aligned to 8
  PackedMatrix w;      // kInt8 or kMxfp4
  float* y;            // [tokens, w.rows], y_stride floats between rows
  int64_t y_stride;
  int64_t tokens;
  int64_t panel_begin, panel_end;  // only outputs of these panels are written
};
void Int8GemmRef(const Int8GemmParams& p);
void Int8Gemm(const Int8GemmParams& p);  // the fastest the CPU has

// Gemm, or Int8Gemm with the rows at `quantized` instead of p.x where there are some.
inline void GemmOrInt8(const GemmParams& p, const std::byte* quantized) {
  if (quantized == nullptr) return Gemm(p);
  Int8Gemm({.x = quantized,
            .w = p.w,
            .y = p.y,
            .y_stride = p.y_stride,
            .tokens = p.tokens,
            .panel_begin = p.panel_begin,
            .panel_end = p.panel_end});
}

// Whether Int8Gemm uses instructions that multiply bytes (VNNI). By itself it does where the CPU has
// them, but not on a CPU that was told to use less than its widest registers. For tests: never, or
// wherever the CPU has them.
enum class ByteProducts { kByItself, kNever, kWhereverThere };
void UseByteProductsForTest(ByteProducts use);
// Whether the kernels do with the widest registers, or else with narrower ones.
bool HasByteProducts(bool wide);

}  // namespace deltamesh::kernels
