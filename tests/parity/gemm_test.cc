#include "kernels/gemm/gemm.h"

#include <limits>
#include <memory>

#include "tests/parity/common.h"

namespace deltamesh::kernels {
namespace {

// Packed weights and the plain values they came from.
struct Weights {
  PackedMatrix packed;
  std::vector<double> values;  // [rows][cols]
  std::vector<std::byte> storage;
};

std::byte* Aligned(std::vector<std::byte>& storage, int64_t bytes) {
  storage.resize(static_cast<size_t>(bytes) + 64);
  const auto address = reinterpret_cast<uintptr_t>(storage.data());
  return storage.data() + (64 - address % 64) % 64;
}

PackedMatrix View(WeightFormat format, int64_t rows, int64_t cols, const std::byte* data) {
  return {.format = format, .rows = rows, .cols = cols, .data = data};
}

Weights MakeDense(WeightFormat format, int64_t rows, int64_t cols, Random& random) {
  const int64_t stride = cols + 3;
  Weights w;
  std::vector<float> f32 = random.Normal(rows * stride, 0.3f);
  std::vector<uint16_t> bf16(f32.size());
  for (size_t i = 0; i < f32.size(); ++i) bf16[i] = FloatToBf16(f32[i]);
  std::byte* data = Aligned(w.storage, PackedBytes(format, rows, cols));
  const bool wide = format == WeightFormat::kF32;
  const PackParams pack = {.format = format,
                           .rows = rows,
                           .cols = cols,
                           .row_stride = stride,
                           .source = wide ? static_cast<void*>(f32.data()) : bf16.data(),
                           .packed = data,
                           .panel_begin = 0,
                           .panel_end = (rows + kPanel - 1) / kPanel};
  Pack(pack);
  w.packed = View(format, rows, cols, data);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols; ++k) {
      const size_t i = static_cast<size_t>(r * stride + k);
      w.values.push_back(wide ? f32[i] : Bf16ToFloat(bf16[i]));
    }
  }
  return w;
}

double MxValue(int code, int scale) {
  static constexpr double kMagnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return std::ldexp((code > 8 ? -1 : 1) * kMagnitude[code & 7], scale - 127);
}

Weights MakeMxfp4(int64_t rows, int64_t cols, int low_scale, int high_scale, Random& random) {
  Weights w;
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols / 2));
  std::vector<uint8_t> scales(static_cast<size_t>(rows * cols / kMxBlock));
  for (uint8_t& c : codes) c = static_cast<uint8_t>(random.Int(0, 255));
  for (uint8_t& s : scales) s = static_cast<uint8_t>(random.Int(low_scale, high_scale));
  std::byte* data = Aligned(w.storage, PackedBytes(WeightFormat::kMxfp4, rows, cols));
  PackMxfp4({.rows = rows,
             .cols = cols,
             .codes = codes.data(),
             .scales = scales.data(),
             .packed = data,
             .panel_begin = 0,
             .panel_end = (rows + kPanel - 1) / kPanel});
  w.packed = View(WeightFormat::kMxfp4, rows, cols, data);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols; ++k) {
      const int pair = codes[static_cast<size_t>(r * cols / 2 + k / 2)];
      const int scale = scales[static_cast<size_t>((r * cols + k) / kMxBlock)];
      w.values.push_back(MxValue(k % 2 == 0 ? pair & 15 : pair >> 4, scale));
    }
  }
  return w;
}

// The packed bytes read by the layout that gemm.h describes.
double Int8Value(const std::byte* data, int64_t cols, int64_t row, int64_t col, double* step) {
  const std::byte* group = data + (row / 32 * (cols / 32) + col / 32) * 1088;
  const int64_t j = row % 32, i = col % 32;
  uint16_t bits;
  std::memcpy(&bits, group + 2 * j, 2);
  *step = Bf16ToFloat(bits);
  return static_cast<int8_t>(group[64 + 128 * (i / 4) + 4 * j + i % 4]) * *step;
}

Weights MakeInt8(int64_t rows, int64_t cols, Random& random) {
  const int64_t stride = cols + 3;
  Weights w;
  std::vector<float> f32 = random.Normal(rows * stride, 0.3f);
  std::vector<uint16_t> bf16(f32.size());
  for (size_t i = 0; i < f32.size(); ++i) bf16[i] = FloatToBf16(f32[i]);
  std::byte* data = Aligned(w.storage, PackedBytes(WeightFormat::kInt8, rows, cols));
  const bool wide = rows % 2 == 0;
  PackInt8({.format = wide ? WeightFormat::kF32 : WeightFormat::kBf16,
            .rows = rows,
            .cols = cols,
            .row_stride = stride,
            .source = wide ? static_cast<void*>(f32.data()) : bf16.data(),
            .packed = data,
            .panel_begin = 0,
            .panel_end = (rows + kPanel - 1) / kPanel});
  w.packed = View(WeightFormat::kInt8, rows, cols, data);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols; ++k) {
      double step;
      w.values.push_back(Int8Value(data, cols, r, k, &step));
    }
  }
  return w;
}

Weights Make(WeightFormat format, int64_t rows, int64_t cols, Random& random) {
  if (format == WeightFormat::kMxfp4) return MakeMxfp4(rows, cols, 118, 132, random);
  if (format == WeightFormat::kInt8) return MakeInt8(rows, cols, random);
  return MakeDense(format, rows, cols, random);
}

constexpr WeightFormat kFormats[] = {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kMxfp4,
                                     WeightFormat::kInt8};

// Columns must be whole groups in formats with scales.
int64_t Cols(WeightFormat format, int64_t cols) {
  const bool grouped = format == WeightFormat::kMxfp4 || format == WeightFormat::kInt8;
  return grouped ? (cols + kMxBlock - 1) / kMxBlock * kMxBlock : cols;
}

using Kernel = void (*)(const GemmParams&);

// Output rows with a stride wider than they are; the gap keeps its marks.
std::vector<float> RunGemm(Kernel kernel, const PackedMatrix& w, const float* x, int64_t x_stride,
                           int64_t tokens, int64_t panel_begin, int64_t panel_end) {
  const int64_t y_stride = w.rows + 5;
  std::vector<float> y(static_cast<size_t>(tokens * y_stride + 1), 77.0f);
  kernel({.x = x,
          .x_stride = x_stride,
          .w = w,
          .y = y.data() + 1,
          .y_stride = y_stride,
          .tokens = tokens,
          .panel_begin = panel_begin,
          .panel_end = panel_end});
  return y;
}

TEST(GemmParity, EqualsReferenceOverOddShapes) {
  Random random(1);
  std::vector<int64_t> dims = {1,  2,  7,  8,  15, 16, 17, 31,  32, 33,
                               40, 63, 64, 65, 70, 95, 97, 130, 260};
  std::vector<int64_t> counts = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 17, 33, 70, 130};
  for (WeightFormat format : kFormats) {
    for (int64_t rows : dims) {
      const int64_t cols = Cols(format, dims[static_cast<size_t>(random.Int(0, 18))]);
      const Weights w = Make(format, rows, cols, random);
      for (int64_t tokens : counts) {
        SCOPED_TRACE(::testing::Message() << "format " << static_cast<int>(format) << " rows "
                                          << rows << " cols " << cols << " tokens " << tokens);
        const int64_t x_stride = cols + random.Int(0, 3);
        const std::vector<float> x = random.Normal(tokens * x_stride + 1);
        const auto run = [&](Kernel kernel) {
          return RunGemm(kernel, w.packed, x.data() + 1, x_stride, tokens, 0, w.packed.panels());
        };
        const std::vector<float> want = run(GemmRef);
        ForEachTarget([&] { EXPECT_TRUE(Identical(run(Gemm), want)); });
      }
    }
  }
}

// Every term x_k w_k passes at most n = cols roundings of its chain, or those of its block of 32 and
// one for each block, so the error is at most gamma(n + 1) * sum |x_k w_k|. Weights are exact in
// float64, so nothing else is lost.
TEST(GemmAccuracy, WithinTheBoundOfTheChain) {
  Random random(2);
  for (WeightFormat format : kFormats) {
    for (int64_t cols : {1, 33, 257, 2048}) {
      const int64_t n = Cols(format, cols), rows = 37, tokens = 3;
      const Weights w = Make(format, rows, n, random);
      const std::vector<float> x = random.Normal(tokens * n);
      const std::vector<float> y =
          RunGemm(GemmRef, w.packed, x.data(), n, tokens, 0, w.packed.panels());
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t o = 0; o < rows; ++o) {
          double sum = 0, size = 0;
          for (int64_t k = 0; k < n; ++k) {
            const double term =
                x[static_cast<size_t>(t * n + k)] * w.values[static_cast<size_t>(o * n + k)];
            sum += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(y[static_cast<size_t>(1 + t * (rows + 5) + o)], sum,
                      Gamma(n + 1) * size + 1e-300);
        }
      }
    }
  }
}

TEST(GemmSplits, NoSplitOfTokensOrPanelsShows) {
  Random random(3);
  const int64_t rows = 150, cols = 160, tokens = 83;
  for (WeightFormat format : kFormats) {
    const Weights w = Make(format, rows, cols, random);
    const std::vector<float> x = random.Normal(tokens * cols);
    ForEachTarget([&] {
      const std::vector<float> whole =
          RunGemm(Gemm, w.packed, x.data(), cols, tokens, 0, w.packed.panels());
      std::vector<float> parts(whole.size(), 77.0f);
      for (int64_t t = 0; t < tokens;) {
        const int64_t count = std::min<int64_t>(random.Int(1, 20), tokens - t);
        for (int64_t panel = 0; panel < w.packed.panels();) {
          const int64_t end = std::min(panel + random.Int(1, 3), w.packed.panels());
          Gemm({.x = x.data() + t * cols,
                .x_stride = cols,
                .w = w.packed,
                .y = parts.data() + 1 + t * (rows + 5),
                .y_stride = rows + 5,
                .tokens = count,
                .panel_begin = panel,
                .panel_end = end});
          panel = end;
        }
        t += count;
      }
      EXPECT_TRUE(Identical(parts, whole));
    });
  }
}

// Every code with every scale, alone in its output: x = 1 in one column.
TEST(GemmMxfp4, AllCodesTimesAllScales) {
  const int64_t rows = 255, cols = kMxBlock;
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols / 2));
  std::vector<uint8_t> scales(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    scales[static_cast<size_t>(r)] = static_cast<uint8_t>(r);
    for (int64_t k = 0; k < cols; k += 2) {
      codes[static_cast<size_t>((r * cols + k) / 2)] =
          static_cast<uint8_t>((k % 16) | ((k + 1) % 16) << 4);
    }
  }
  std::vector<std::byte> storage;
  std::byte* data = Aligned(storage, PackedBytes(WeightFormat::kMxfp4, rows, cols));
  // In two calls, as a loader that splits the work does.
  for (int64_t begin : {0, 3}) {
    PackMxfp4({rows, cols, codes.data(), scales.data(), data, begin, begin == 0 ? 3 : 8});
  }
  const PackedMatrix w = View(WeightFormat::kMxfp4, rows, cols, data);
  for (int64_t k = 0; k < cols; ++k) {
    for (int64_t r = 0; r < rows; ++r) {
      const float want = static_cast<float>(MxValue(static_cast<int>(k % 16), static_cast<int>(r)));
      ASSERT_TRUE(SameBits(UnpackOne(w, r, k), want)) << "scale " << r << " code " << k % 16;
    }
    std::vector<float> x(static_cast<size_t>(9 * cols), 0.0f);
    for (int64_t t = 0; t < 9; ++t) x[static_cast<size_t>(t * cols + k)] = 1.0f;
    for (int64_t tokens : {1, 2, 9}) {
      // Weights of scales 253 and 254 may be too large for a float; compare with the reference.
      const std::vector<float> want = RunGemm(GemmRef, w, x.data(), cols, tokens, 0, 8);
      ForEachTarget([&] {
        const std::vector<float> y = RunGemm(Gemm, w, x.data(), cols, tokens, 0, 8);
        ASSERT_TRUE(Identical(y, want));
        for (int64_t r = 0; r < 253; ++r) {  // scales up to 25 count as zero
          ASSERT_EQ(y[static_cast<size_t>(1 + r)],
                    r > 25 ? MxValue(static_cast<int>(k % 16), static_cast<int>(r)) : 0);
        }
      });
    }
  }
}

// The rule of gemm.h in float64: the step is at least amax / 127 and at most a bf16 above, every
// weight is within half a step, the largest of a block reaches at least code 126.
TEST(GemmInt8, QuantisesToTheNearestCode) {
  Random random(5);
  const int64_t rows = 70, cols = 96;
  std::vector<float> f = random.Normal(rows * cols);
  const float scales[] = {1e-30f, 1e-5f, 1.0f, 1e5f, 1e36f, 0.0f, 1e-29f};
  for (size_t i = 0; i < f.size(); ++i) f[i] *= scales[i / 32 % 7];
  f[0] = 3e38f;
  std::fill_n(f.begin() + 32, 32, std::numeric_limits<float>::max());
  std::vector<std::byte> storage;
  std::byte* data = Aligned(storage, PackedBytes(WeightFormat::kInt8, rows, cols));
  for (int64_t begin : {0, 2}) {  // in two calls, as a loader that splits the work does
    PackInt8({WeightFormat::kF32, rows, cols, cols, f.data(), data, begin, begin == 0 ? 2 : 3});
  }
  const PackedMatrix w = View(WeightFormat::kInt8, rows, cols, data);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k0 = 0; k0 < cols; k0 += 32) {
      double amax = 0, step = 0, largest = 0;
      for (int64_t k = k0; k < k0 + 32; ++k) {
        amax = std::max<double>(amax, std::fabs(f[static_cast<size_t>(r * cols + k)]));
      }
      const bool top = amax > 3e38;  // codes are cut there
      for (int64_t k = k0; k < k0 + 32; ++k) {
        const double want = f[static_cast<size_t>(r * cols + k)];
        const double got = Int8Value(data, cols, r, k, &step);
        ASSERT_EQ(UnpackOne(w, r, k), got);
        ASSERT_TRUE(std::isfinite(UnpackOne(w, r, k)));
        if (amax < kInt8Least) {
          ASSERT_EQ(got, 0);
        } else {
          ASSERT_LE(std::fabs(got - want), step * (top ? 1.5 : 0.5) * (1 + 1e-6)) << r << "," << k;
        }
        largest = std::max(largest, std::fabs(got));
      }
      if (amax < kInt8Least) continue;
      ASSERT_LE(step, amax / 127 * (1 + 0x1p-7) * (1 + 1e-6));
      if (!top) {
        ASSERT_GE(step, amax / 127 * (1 - 1e-6));
      }
      ASSERT_GE(largest, 126 * step);
    }
  }
}

// Every code with scales from the least to the largest, alone in its output.
TEST(GemmInt8, AllCodesTimesManyScales) {
  const int64_t rows = 255, cols = 32;
  for (int exponent : {-89, -30, 0, 60, 120}) {
    std::vector<float> f(static_cast<size_t>(rows * cols), 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      f[static_cast<size_t>(r * cols)] = std::ldexp(127.0f, exponent - 6);
      for (int64_t k = 1; k < cols; ++k) {
        f[static_cast<size_t>(r * cols + k)] =
            std::ldexp(static_cast<float>(r - 127), exponent - 6);
      }
    }
    std::vector<std::byte> storage;
    std::byte* data = Aligned(storage, PackedBytes(WeightFormat::kInt8, rows, cols));
    PackInt8({WeightFormat::kF32, rows, cols, cols, f.data(), data, 0, 8});
    const PackedMatrix w = View(WeightFormat::kInt8, rows, cols, data);
    for (int64_t k = 0; k < cols; ++k) {
      std::vector<float> x(static_cast<size_t>(9 * cols), 0.0f);
      for (int64_t t = 0; t < 9; ++t) x[static_cast<size_t>(t * cols + k)] = 1.0f;
      for (int64_t tokens : {1, 2, 9}) {
        ForEachTarget([&] {
          const std::vector<float> y = RunGemm(Gemm, w, x.data(), cols, tokens, 0, 8);
          for (int64_t r = 0; r < rows; ++r) {
            ASSERT_EQ(y[static_cast<size_t>(1 + r)], f[static_cast<size_t>(r * cols + k)]);
          }
        });
      }
    }
  }
}

// The comparison must be able to fail: the same products added in another order give other bits.
TEST(GemmCanary, ReversedSumIsDifferent) {
  Random random(4);
  const int64_t rows = 64, cols = 96;
  const Weights w = MakeDense(WeightFormat::kF32, rows, cols, random);
  const std::vector<float> x = random.Normal(cols);
  const std::vector<float> y = RunGemm(Gemm, w.packed, x.data(), cols, 1, 0, w.packed.panels());
  int different = 0;
  for (int64_t o = 0; o < rows; ++o) {
    float acc = 0.0f;
    for (int64_t k = cols - 1; k >= 0; --k) {
      acc = std::fma(x[static_cast<size_t>(k)], UnpackOne(w.packed, o, k), acc);
    }
    different += !SameBits(acc, y[static_cast<size_t>(1 + o)]);
  }
  EXPECT_GT(different, rows / 2);
}

}  // namespace
}  // namespace deltamesh::kernels
