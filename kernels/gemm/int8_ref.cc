#include <cmath>
#include <cstring>
#include <limits>

#include "hwy/base.h"
#include "kernels/gemm/int8_activations.h"

namespace deltamesh::kernels {
namespace {

// One block of a quantised row.
struct RowBlock {
  int8_t codes[kMxBlock] = {};
  float scale = 0;
  int32_t offset = 0;
};

RowBlock QuantizeBlock(const float* x) {
  RowBlock block;
  float amax = 0;
  for (int64_t i = 0; i < kMxBlock; ++i) {
    if (!std::isfinite(x[i])) {
      block.scale = std::numeric_limits<float>::quiet_NaN();
      return block;
    }
    amax = std::fmax(amax, std::fabs(x[i]));
  }
  if (amax < kInt8Least) return block;
  block.scale = amax / 127.0f;
  const float inverse = 127.0f / amax;
  for (int64_t i = 0; i < kMxBlock; ++i) {
    block.codes[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse));
    block.offset -= 128 * block.codes[i];
  }
  return block;
}

// One block of an output's weights.
struct WeightBlock {
  int32_t integers[kMxBlock];
  float scale;
};

WeightBlock Int8Block(const PackedMatrix& w, int64_t row, int64_t g) {
  constexpr int64_t kGroupBytes = 2 * kPanel + kMxBlock * kPanel;
  const auto* group = reinterpret_cast<const uint8_t*>(w.data) +
                      (row / kPanel * (w.cols / kMxBlock) + g) * kGroupBytes;
  const int64_t j = row % kPanel;
  WeightBlock block;
  uint16_t bits;
  std::memcpy(&bits, group + 2 * j, sizeof(bits));
  block.scale = Bf16ToFloat(bits);
  for (int64_t i = 0; i < kMxBlock; ++i) {
    block.integers[i] = static_cast<int8_t>(group[2 * kPanel + i / 4 * 4 * kPanel + 4 * j + i % 4]);
  }
  return block;
}

WeightBlock MxBlock(const PackedMatrix& w, int64_t row, int64_t g) {
  constexpr int32_t kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  constexpr int64_t kGroupBytes = kPanel + kMxBlock * kPanel / 2;
  const auto* group = reinterpret_cast<const uint8_t*>(w.data) +
                      (row / kPanel * (w.cols / kMxBlock) + g) * kGroupBytes;
  const int64_t j = row % kPanel;
  WeightBlock block;
  block.scale = MxScale(group[j]) * 0.5f;
  for (int64_t i = 0; i < kMxBlock; ++i) {
    const uint8_t pair = group[kPanel + i / 4 * 2 * kPanel + 4 * (j % (kPanel / 2)) + i % 4];
    const int code = j < kPanel / 2 ? pair & 15 : pair >> 4;
    block.integers[i] = (code & 8) != 0 ? -kDoubled[code & 7] : kDoubled[code & 7];
  }
  return block;
}

WeightBlock BlockOf(const PackedMatrix& w, int64_t row, int64_t g) {
  HWY_ASSERT(TakesInt8(w.format));
  return w.format == WeightFormat::kInt8 ? Int8Block(w, row, g) : MxBlock(w, row, g);
}

float ReadFloat(const std::byte* at) {
  float value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

}  // namespace

void QuantizeRowsRef(const QuantizeParams& p) {
  const int64_t blocks = p.cols / kMxBlock;
  for (int64_t t = 0; t < p.tokens; ++t) {
    std::byte* row = p.rows + t * Int8RowBytes(p.cols);
    for (int64_t b = p.block_begin; b < p.block_end; ++b) {
      const RowBlock block = QuantizeBlock(p.x + t * p.x_stride + b * kMxBlock);
      std::memcpy(row + b * kMxBlock, block.codes, sizeof(block.codes));
      std::memcpy(row + p.cols + 4 * b, &block.scale, sizeof(block.scale));
      std::memcpy(row + p.cols + 4 * (blocks + b), &block.offset, sizeof(block.offset));
    }
  }
}

void Int8GemmRef(const Int8GemmParams& p) {
  const int64_t row_begin = p.panel_begin * kPanel, blocks = p.w.cols / kMxBlock;
  const int64_t row_end = p.panel_end * kPanel < p.w.rows ? p.panel_end * kPanel : p.w.rows;
  for (int64_t o = row_begin; o < row_end; ++o) {
    for (int64_t t = 0; t < p.tokens; ++t) p.y[t * p.y_stride + o] = 0.0f;
    for (int64_t b = 0; b < blocks; ++b) {
      const WeightBlock w = BlockOf(p.w, o, b);
      for (int64_t t = 0; t < p.tokens; ++t) {
        const std::byte* row = p.x + t * Int8RowBytes(p.w.cols);
        int32_t isum = 0;
        for (int64_t i = 0; i < kMxBlock; ++i) {
          isum += static_cast<int8_t>(row[b * kMxBlock + i]) * w.integers[i];
        }
        float& y = p.y[t * p.y_stride + o];
        y = std::fma(static_cast<float>(isum), ReadFloat(row + p.w.cols + 4 * b) * w.scale, y);
      }
    }
  }
}

}  // namespace deltamesh::kernels
