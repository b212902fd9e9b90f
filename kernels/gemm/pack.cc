#include "kernels/gemm/gemm.h"

namespace deltamesh::kernels {
namespace {

constexpr int64_t kMxRowBytes = kPanel / 2;
constexpr int64_t kMxGroupBytes = kPanel + kMxBlock * kMxRowBytes;

// Columns packed at a time: a stretch of a panel, so that the scattered stores stay in the first-level
// cache.
constexpr int64_t kPackStretch = 32;

template <class T>
void PackElements(const PackParams& p) {
  const T* source = static_cast<const T*>(p.source);
  for (int64_t panel = p.panel_begin; panel < p.panel_end; ++panel) {
    T* out = reinterpret_cast<T*>(p.packed) + panel * p.cols * kPanel;
    for (int64_t k0 = 0; k0 < p.cols; k0 += kPackStretch) {
      const int64_t k1 = k0 + kPackStretch < p.cols ? k0 + kPackStretch : p.cols;
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t row = panel * kPanel + j;
        const T* in = source + row * p.row_stride;
        for (int64_t k = k0; k < k1; ++k) out[k * kPanel + j] = row < p.rows ? in[k] : T{0};
      }
    }
  }
}

// The codes of 32 columns of one output, or zeros beyond the last output.
const uint8_t* CodesAt(const PackMxfp4Params& p, int64_t row, int64_t group) {
  static constexpr uint8_t kZeros[kMxBlock / 2] = {};
  if (row >= p.rows) return kZeros;
  return p.codes + row * (p.cols / 2) + group * (kMxBlock / 2);
}

void PackMxGroup(const PackMxfp4Params& p, int64_t panel, int64_t group, uint8_t* out) {
  for (int64_t j = 0; j < kPanel; ++j) {
    const int64_t row = panel * kPanel + j;
    out[j] = row < p.rows ? p.scales[row * (p.cols / kMxBlock) + group] : 0;
  }
  uint8_t* codes = out + kPanel;
  for (int64_t j = 0; j < kMxRowBytes; ++j) {
    const uint8_t* low = CodesAt(p, panel * kPanel + j, group);
    const uint8_t* high = CodesAt(p, panel * kPanel + j + kMxRowBytes, group);
    for (int64_t i = 0; i < kMxBlock / 2; ++i) {  // columns 2 i and 2 i + 1
      codes[2 * i * kMxRowBytes + j] = static_cast<uint8_t>((low[i] & 15) | high[i] << 4);
      codes[(2 * i + 1) * kMxRowBytes + j] = static_cast<uint8_t>(low[i] >> 4 | (high[i] & 0xF0));
    }
  }
}

float UnpackMxfp4(const uint8_t* panel, int64_t j, int64_t col) {
  static constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const uint8_t* group = panel + col / kMxBlock * kMxGroupBytes;
  const uint8_t pair = group[kPanel + col % kMxBlock * kMxRowBytes + j % kMxRowBytes];
  const uint8_t code = j < kMxRowBytes ? pair & 15 : pair >> 4;
  const float magnitude = kMagnitude[code & 7];
  return (code & 8 ? -magnitude : magnitude) * MxScale(group[j]);
}

}  // namespace

int64_t PackedBytes(WeightFormat format, int64_t rows, int64_t cols) {
  const int64_t panels = (rows + kPanel - 1) / kPanel;
  switch (format) {
    case WeightFormat::kF32:
      return panels * cols * kPanel * static_cast<int64_t>(sizeof(float));
    case WeightFormat::kBf16:
      return panels * cols * kPanel * static_cast<int64_t>(sizeof(uint16_t));
    case WeightFormat::kMxfp4:
      return panels * (cols / kMxBlock) * kMxGroupBytes;
  }
  return 0;
}

void Pack(const PackParams& p) {
  if (p.format == WeightFormat::kF32) {
    PackElements<float>(p);
  } else {
    PackElements<uint16_t>(p);
  }
}

void PackMxfp4(const PackMxfp4Params& p) {
  const int64_t groups = p.cols / kMxBlock;
  for (int64_t panel = p.panel_begin; panel < p.panel_end; ++panel) {
    for (int64_t g = 0; g < groups; ++g) {
      PackMxGroup(p, panel, g,
                  reinterpret_cast<uint8_t*>(p.packed) + (panel * groups + g) * kMxGroupBytes);
    }
  }
}

float UnpackOne(const PackedMatrix& w, int64_t row, int64_t col) {
  const int64_t panel = row / kPanel, j = row % kPanel;
  const int64_t element = (panel * w.cols + col) * kPanel + j;
  switch (w.format) {
    case WeightFormat::kF32:
      return reinterpret_cast<const float*>(w.data)[element];
    case WeightFormat::kBf16:
      return Bf16ToFloat(reinterpret_cast<const uint16_t*>(w.data)[element]);
    case WeightFormat::kMxfp4:
      break;
  }
  const int64_t panel_bytes = w.cols / kMxBlock * kMxGroupBytes;
  return UnpackMxfp4(reinterpret_cast<const uint8_t*>(w.data) + panel * panel_bytes, j, col);
}

}  // namespace deltamesh::kernels
