// y = x * W^T with W packed once at load.
//
// The law. kF32, kBf16: y[t][o] is one chain acc = fma(x[t][k], w[o][k], acc) over ascending k from
// acc = +0, with w the stored value. kInt8, kMxfp4: for each block of 32 columns in ascending order
// acc = fma(s, scale, acc), from acc = +0, with s the chain s = fma(x[t][k], code, s) over the
// block's columns from s = +0. So the bits do not depend on tokens, panels, threads or instruction
// set. Code and scale, whose product is the weight, are exact floats:
//   kInt8    2^24 times the signed byte, and 2^-24 times the stored scale
//   kMxfp4   2^25 times the code's value, minus zero being zero, and 2^(c - 152) for the scale byte
//            c, but 0 up to c = 25, that is, weights below 2^-99 count as zero
// (a byte at the top of an integer is cheaper to convert). Inputs must stay below 2^90.
//
// Packed layout, panel p holding outputs [32 p, 32 p + 32), missing outputs zero:
//   kF32, kBf16   [panel][k][32] of the element
//   kMxfp4        [panel][k / 32][ 32 scale bytes | 8 rows (one per 4 k) of 64 bytes ],
//                 byte 4 j + i of row r: low nibble output j, high nibble output j + 16, both of
//                 column 4 r + i
//   kInt8         [panel][k / 32][ 32 bf16 scales | 8 rows (one per 4 k) of 32 x 4 signed bytes ],
//                 byte 4 j + i of row r: output j, column 4 r + i
// Four columns of an output side by side are what integer products of groups of four take too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/types.h"

namespace deltamesh::kernels {

// A view of packed weights; never owns.
struct PackedMatrix {
  WeightFormat format = WeightFormat::kF32;
  int64_t rows = 0;                 // outputs
  int64_t cols = 0;                 // k; a multiple of 32 for kMxfp4 and kInt8
  const std::byte* data = nullptr;  // [PackedBytes(format, rows, cols)], 64-byte aligned

  int64_t panels() const { return (rows + kPanel - 1) / kPanel; }
};

int64_t PackedBytes(WeightFormat format, int64_t rows, int64_t cols);

// Row-major stored weights into the packed layout. `row_stride` counts elements between rows of the
// source (cols when dense). Panels [panel_begin, panel_end) are written, so callers may split the
// work.
struct PackParams {
  WeightFormat format;
  int64_t rows, cols, row_stride;
  const void* source;  // float or uint16_t (bf16) [rows, row_stride]
  std::byte* packed;   // [PackedBytes]
  int64_t panel_begin, panel_end;
};
void Pack(const PackParams& p);  // kF32 and kBf16

struct PackMxfp4Params {
  int64_t rows, cols;
  const uint8_t* codes;   // [rows, cols / 2]: low nibble = even column
  const uint8_t* scales;  // [rows, cols / 32]: E8M0, 255 is not allowed
  std::byte* packed;
  int64_t panel_begin, panel_end;
};
void PackMxfp4(const PackMxfp4Params& p);

// Quantises to kInt8: 32 columns of an output share the scale s, the smallest bf16 not below the
// float quotient amax / 127, and a code is w / s rounded to nearest, ties to even, within
// [-127, 127]. Blocks with amax below kInt8Least become zeros. `cols` is a multiple of 32.
inline constexpr float kInt8Least = 0x1p-90f;
void PackInt8(const PackParams& p);  // p.format is the source's: kF32 or kBf16

// One stored weight in the factors of the law; the scale of formats without one is 1.
struct WeightFactors {
  float code;
  float scale;
};
WeightFactors UnpackFactors(const PackedMatrix& w, int64_t row, int64_t col);

// The stored weight itself, exact unless too large for a float, and whatever its scale; for tests and
// for reading single rows.
float UnpackOne(const PackedMatrix& w, int64_t row, int64_t col);

struct GemmParams {
  const float* x;  // [tokens, cols], x_stride floats between rows
  int64_t x_stride;
  PackedMatrix w;
  float* y;  // [tokens, rows], y_stride floats between rows
  int64_t y_stride;
  int64_t tokens;
  int64_t panel_begin, panel_end;  // only outputs of these panels are written
};
void GemmRef(const GemmParams& p);
void Gemm(const GemmParams& p);  // the fastest the CPU has

}  // namespace deltamesh::kernels
