#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/gemm/gemm.h"

namespace deltamesh::kernels {
namespace {

constexpr int64_t kMxHalf = kPanel / 2;  // outputs in low nibbles
constexpr int64_t kMxGroupBytes = kPanel + kMxBlock * kMxHalf;

// Where the codes of output j and column i lie in the groups of formats with four columns side by
// side and `outputs` of them in a row.
int64_t QuadOffset(int64_t outputs, int64_t j, int64_t i) {
  return i / 4 * 4 * outputs + 4 * j + i % 4;
}

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
  for (int64_t j = 0; j < kMxHalf; ++j) {
    const uint8_t* low = CodesAt(p, panel * kPanel + j, group);
    const uint8_t* high = CodesAt(p, panel * kPanel + j + kMxHalf, group);
    for (int64_t i = 0; i < kMxBlock / 2; ++i) {  // columns 2 i and 2 i + 1
      uint8_t* pair = codes + QuadOffset(kMxHalf, j, 2 * i);
      pair[0] = static_cast<uint8_t>((low[i] & 15) | high[i] << 4);
      pair[1] = static_cast<uint8_t>(low[i] >> 4 | (high[i] & 0xF0));
    }
  }
}

constexpr int64_t kInt8ScaleBytes = kPanel * static_cast<int64_t>(sizeof(uint16_t));
constexpr int64_t kInt8GroupBytes = kInt8ScaleBytes + kMxBlock * kPanel;

float ToFloat(float value) { return value; }
float ToFloat(uint16_t bits) { return Bf16ToFloat(bits); }

// The scale of a block whose largest magnitude is `amax`, as bf16 bits.
uint16_t Int8Scale(float amax) {
  if (amax < kInt8Least) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(amax / 127.0f);
  const auto up = static_cast<uint16_t>((bits + 0xFFFF) >> 16);
  // Next to the largest float 127 steps would leave its range; the codes are cut instead.
  return std::isfinite(127.0f * Bf16ToFloat(up)) ? up : static_cast<uint16_t>(up - 1);
}

// Packs the 32 columns at `in` of output j.
template <class T>
void PackInt8Block(const T* in, int64_t j, uint8_t* group) {
  float values[kMxBlock];
  float amax = 0;
  for (int64_t i = 0; i < kMxBlock; ++i) values[i] = ToFloat(in[i]);
  for (int64_t i = 0; i < kMxBlock; ++i) amax = std::fmax(amax, std::fabs(values[i]));
  const uint16_t scale = Int8Scale(amax);
  std::memcpy(group + j * static_cast<int64_t>(sizeof(scale)), &scale, sizeof(scale));
  const float step = scale == 0 ? 1.0f : Bf16ToFloat(scale);
  uint8_t* codes = group + kInt8ScaleBytes;
  for (int64_t i = 0; i < kMxBlock; ++i) {
    const float code = scale == 0 ? 0.0f : std::nearbyint(values[i] / step);
    const float cut = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
    codes[QuadOffset(kPanel, j, i)] = static_cast<uint8_t>(static_cast<int8_t>(cut));
  }
}

template <class T>
void PackInt8Elements(const PackParams& p) {
  static constexpr T kZeros[kMxBlock] = {};
  const int64_t groups = p.cols / kMxBlock;
  for (int64_t panel = p.panel_begin; panel < p.panel_end; ++panel) {
    auto* out = reinterpret_cast<uint8_t*>(p.packed) + panel * groups * kInt8GroupBytes;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t row = panel * kPanel + j;
        const T* in = row < p.rows
                          ? static_cast<const T*>(p.source) + row * p.row_stride + g * kMxBlock
                          : kZeros;
        PackInt8Block(in, j, out + g * kInt8GroupBytes);
      }
    }
  }
}

WeightFactors UnpackInt8(const uint8_t* panel, int64_t j, int64_t col) {
  const uint8_t* group = panel + col / kMxBlock * kInt8GroupBytes;
  uint16_t scale;
  std::memcpy(&scale, group + j * static_cast<int64_t>(sizeof(scale)), sizeof(scale));
  const auto code =
      static_cast<int8_t>(group[kInt8ScaleBytes + QuadOffset(kPanel, j, col % kMxBlock)]);
  return {static_cast<float>(code) * 0x1p24f, Bf16ToFloat(scale) * 0x1p-24f};
}

struct MxWeight {
  float value;  // of the code
  uint8_t scale;
};

MxWeight UnpackMxfp4(const PackedMatrix& w, int64_t row, int64_t col) {
  static constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const int64_t panel = row / kPanel, j = row % kPanel;
  const auto* group = reinterpret_cast<const uint8_t*>(w.data) +
                      (panel * (w.cols / kMxBlock) + col / kMxBlock) * kMxGroupBytes;
  const uint8_t pair = group[kPanel + QuadOffset(kMxHalf, j % kMxHalf, col % kMxBlock)];
  const uint8_t code = j < kMxHalf ? pair & 15 : pair >> 4;
  const float magnitude = kMagnitude[code & 7];
  return {code > 8 ? -magnitude : magnitude, group[j]};
}

WeightFactors MxFactors(const MxWeight& w) {
  return {w.value * 0x1p25f, w.scale > 25 ? std::ldexp(1.0f, w.scale - 152) : 0.0f};
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
    case WeightFormat::kInt8:
      return panels * (cols / kMxBlock) * kInt8GroupBytes;
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

void PackInt8(const PackParams& p) {
  if (p.format == WeightFormat::kF32) {
    PackInt8Elements<float>(p);
  } else {
    PackInt8Elements<uint16_t>(p);
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

WeightFactors UnpackFactors(const PackedMatrix& w, int64_t row, int64_t col) {
  const int64_t panel = row / kPanel, j = row % kPanel;
  const int64_t element = (panel * w.cols + col) * kPanel + j;
  const int64_t group = panel * (w.cols / kMxBlock);
  const auto* bytes = reinterpret_cast<const uint8_t*>(w.data);
  switch (w.format) {
    case WeightFormat::kF32:
      return {reinterpret_cast<const float*>(w.data)[element], 1.0f};
    case WeightFormat::kBf16:
      return {Bf16ToFloat(reinterpret_cast<const uint16_t*>(w.data)[element]), 1.0f};
    case WeightFormat::kInt8:
      return UnpackInt8(bytes + group * kInt8GroupBytes, j, col);
    case WeightFormat::kMxfp4:
      break;
  }
  return MxFactors(UnpackMxfp4(w, row, col));
}

float UnpackOne(const PackedMatrix& w, int64_t row, int64_t col) {
  if (w.format == WeightFormat::kMxfp4) {
    const MxWeight mx = UnpackMxfp4(w, row, col);
    return mx.value * MxScale(mx.scale);
  }
  const WeightFactors f = UnpackFactors(w, row, col);
  return f.code * f.scale;
}

}  // namespace deltamesh::kernels
