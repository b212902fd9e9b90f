// Integer products against their definition, bit for bit, with and without instructions for bytes; the
// definition against float64.
#include <algorithm>
#include <limits>

#include "kernels/gemm/int8_activations.h"
#include "tests/parity/common.h"

namespace deltamesh::kernels {
namespace {

// Bytes aligned as the kernels ask.
struct Storage {
  std::byte* Take(int64_t bytes) {
    data.assign(static_cast<size_t>(bytes) + 64, std::byte{0xA5});
    const auto address = reinterpret_cast<uintptr_t>(data.data());
    return data.data() + (64 - address % 64) % 64;
  }
  std::vector<std::byte> data;
};

// Weights in the packed layout, and as exact values.
struct Weights {
  PackedMatrix packed;
  std::vector<double> values;  // [rows][cols]
  Storage storage;
};

void PackCodes(int64_t rows, int64_t cols, Random& random, std::byte* data) {
  std::vector<float> f = random.Normal(rows * cols, 0.3f);
  f[0] = 1.0f;
  PackInt8({.format = WeightFormat::kF32,
            .rows = rows,
            .cols = cols,
            .row_stride = cols,
            .source = f.data(),
            .packed = data,
            .panel_begin = 0,
            .panel_end = (rows + kPanel - 1) / kPanel});
}

void PackMx(int64_t rows, int64_t cols, int low_scale, int high_scale, Random& random,
            std::byte* data) {
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols / 2));
  std::vector<uint8_t> scales(static_cast<size_t>(rows * cols / kMxBlock));
  for (uint8_t& c : codes) c = static_cast<uint8_t>(random.Int(0, 255));
  for (uint8_t& s : scales) s = static_cast<uint8_t>(random.Int(low_scale, high_scale));
  PackMxfp4({.rows = rows,
             .cols = cols,
             .codes = codes.data(),
             .scales = scales.data(),
             .packed = data,
             .panel_begin = 0,
             .panel_end = (rows + kPanel - 1) / kPanel});
}

Weights Make(WeightFormat format, int64_t rows, int64_t cols, Random& random, int low_scale = 118,
             int high_scale = 132) {
  Weights w;
  std::byte* data = w.storage.Take(PackedBytes(format, rows, cols));
  if (format == WeightFormat::kMxfp4) {
    PackMx(rows, cols, low_scale, high_scale, random, data);
  } else {
    PackCodes(rows, cols, random, data);
  }
  w.packed = {.format = format, .rows = rows, .cols = cols, .data = data};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols; ++k) w.values.push_back(UnpackOne(w.packed, r, k));
  }
  return w;
}

constexpr WeightFormat kFormats[] = {WeightFormat::kInt8, WeightFormat::kMxfp4};

// On every target, with and without products of bytes where the CPU has them.
template <class Body>
void ForEachWay(const Body& body) {
  ForEachTarget([&] {
    for (const ByteProducts use : {ByteProducts::kWhereverThere, ByteProducts::kNever}) {
      SCOPED_TRACE(use == ByteProducts::kNever ? "no products of bytes" : "products of bytes");
      UseByteProductsForTest(use);
      body();
    }
    UseByteProductsForTest(ByteProducts::kByItself);
  });
}

// Quantised rows, with a gap behind them that must keep its marks.
struct Quantized {
  Storage storage;
  const std::byte* rows = nullptr;
  int64_t bytes = 0;

  bool operator==(const Quantized& o) const {
    return bytes == o.bytes && std::memcmp(rows, o.rows, static_cast<size_t>(bytes) + 8) == 0;
  }
  float Scale(int64_t cols, int64_t t, int64_t b) const {
    float scale;
    std::memcpy(&scale, rows + t * Int8RowBytes(cols) + cols + 4 * b, sizeof(scale));
    return scale;
  }
  int Code(int64_t cols, int64_t t, int64_t k) const {
    return static_cast<int8_t>(rows[t * Int8RowBytes(cols) + k]);
  }
  int32_t Offset(int64_t cols, int64_t t, int64_t b) const {
    int32_t offset;
    std::memcpy(&offset, rows + t * Int8RowBytes(cols) + cols + cols / 8 + 4 * b, sizeof(offset));
    return offset;
  }
};

Quantized Quantize(void (*quantize)(const QuantizeParams&), const float* x, int64_t x_stride,
                   int64_t tokens, int64_t cols, int64_t piece = 1 << 20) {
  Quantized q;
  q.bytes = tokens * Int8RowBytes(cols);
  std::byte* rows = q.storage.Take(q.bytes + 8);
  q.rows = rows;
  for (int64_t b = 0; b < cols / kMxBlock; b += piece) {
    quantize({.x = x,
              .x_stride = x_stride,
              .rows = rows,
              .tokens = tokens,
              .cols = cols,
              .block_begin = b,
              .block_end = std::min(b + piece, cols / kMxBlock)});
  }
  return q;
}

std::vector<float> Multiply(void (*kernel)(const Int8GemmParams&), const PackedMatrix& w,
                            const Quantized& x, int64_t tokens) {
  const int64_t y_stride = w.rows + 5;
  std::vector<float> y(static_cast<size_t>(tokens * y_stride + 1), 77.0f);
  kernel({.x = x.rows,
          .w = w,
          .y = y.data() + 1,
          .y_stride = y_stride,
          .tokens = tokens,
          .panel_begin = 0,
          .panel_end = w.panels()});
  return y;
}

// Blocks of many sizes, with the awkward ones in between.
std::vector<float> AwkwardRows(int64_t tokens, int64_t cols, Random& random) {
  std::vector<float> x = random.Normal(tokens * cols);
  const float sizes[] = {1.0f, 1e-20f, 0.0f, 1e-28f, 1e30f, 3.0f, 8e-28f, 1e38f};
  for (size_t i = 0; i < x.size(); ++i) x[i] *= sizes[i / 32 % 8];
  for (size_t i = 0; i < x.size(); i += 97) x[i] = -0.0f;
  return x;
}

TEST(Int8Quantize, EqualsReferenceInAnyPieces) {
  Random random(1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const int64_t cols : {32, 64, 96, 320, 1056}) {
    for (const int64_t tokens : {1, 2, 7}) {
      std::vector<float> x = AwkwardRows(tokens, cols + 3, random);
      for (const float bad : {0.0f, nan, -nan, infinity, -infinity}) {
        x[static_cast<size_t>(random.Int(0, cols - 1))] = bad;
        const Quantized want = Quantize(QuantizeRowsRef, x.data(), cols + 3, tokens, cols);
        ForEachTarget([&] {
          for (const int64_t piece : {int64_t{1}, int64_t{3}, int64_t{1000}}) {
            EXPECT_EQ(Quantize(QuantizeRows, x.data(), cols + 3, tokens, cols, piece), want);
          }
        });
      }
    }
  }
}

// The rule of the header in float64: the step is amax / 127 within a rounding, every value is within
// half a step plus what the two roundings of x * (127 / amax) can move 127 steps: 2 * 2^-24 each.
TEST(Int8Quantize, RoundsToTheNearestStep) {
  Random random(2);
  const int64_t cols = 32 * 64, tokens = 5;
  const std::vector<float> x = AwkwardRows(tokens, cols, random);
  const Quantized q = Quantize(QuantizeRowsRef, x.data(), cols, tokens, cols);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t b = 0; b < cols / 32; ++b) {
      const float* block = x.data() + t * cols + b * 32;
      double amax = 0;
      int sum = 0, largest = 0;
      for (int64_t i = 0; i < 32; ++i) amax = std::max<double>(amax, std::fabs(block[i]));
      const double step = q.Scale(cols, t, b);
      for (int64_t i = 0; i < 32; ++i) {
        const int code = q.Code(cols, t, b * 32 + i);
        sum += code;
        largest = std::max(largest, std::abs(code));
        ASSERT_LE(std::fabs(code * step - block[i]), step * 0.5001 + (step == 0 ? kInt8Least : 0));
      }
      ASSERT_EQ(q.Offset(cols, t, b), -128 * sum);
      if (amax < kInt8Least) {
        ASSERT_EQ(step, 0);
        ASSERT_EQ(largest, 0);
      } else {
        ASSERT_NEAR(step, amax / 127, amax / 127 * kUnit);
        ASSERT_EQ(largest, 127);
      }
    }
  }
}

TEST(Int8Parity, EqualsReferenceOverOddShapes) {
  Random random(3);
  for (const WeightFormat format : kFormats) {
    for (const int64_t rows : {1, 31, 32, 33, 95, 130}) {
      const int64_t cols = 32 * random.Int(1, 11);
      const Weights w = Make(format, rows, cols, random);
      for (const int64_t tokens : {0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 31, 64, 65, 97, 130}) {
        SCOPED_TRACE(::testing::Message() << "format " << static_cast<int>(format) << " rows "
                                          << rows << " cols " << cols << " tokens " << tokens);
        const std::vector<float> x = AwkwardRows(tokens, cols, random);
        const Quantized q = Quantize(QuantizeRowsRef, x.data(), cols, tokens, cols);
        const std::vector<float> want = Multiply(Int8GemmRef, w.packed, q, tokens);
        ForEachWay([&] { EXPECT_TRUE(Identical(Multiply(Int8Gemm, w.packed, q, tokens), want)); });
      }
    }
  }
}

TEST(Int8Parity, EveryNumberOfTokens) {
  Random random(4);
  const int64_t rows = 33, cols = 96;
  for (const WeightFormat format : kFormats) {
    const Weights w = Make(format, rows, cols, random);
    for (int64_t tokens = 1; tokens <= 130; ++tokens) {
      const std::vector<float> x = random.Normal(tokens * cols);
      const Quantized q = Quantize(QuantizeRowsRef, x.data(), cols, tokens, cols);
      const std::vector<float> want = Multiply(Int8GemmRef, w.packed, q, tokens);
      ForEachWay([&] { EXPECT_TRUE(Identical(Multiply(Int8Gemm, w.packed, q, tokens), want)); });
    }
  }
}

// MXFP4 scales from the least, a subnormal that is halved exactly, to the largest below infinities.
TEST(Int8Parity, AllScalesOfMxfp4) {
  Random random(9);
  const int64_t rows = 40, cols = 64;
  for (const int scale : {0, 1, 2, 60, 127, 200, 252}) {
    const Weights w = Make(WeightFormat::kMxfp4, rows, cols, random, scale, scale);
    for (const int64_t tokens : {1, 9}) {
      const std::vector<float> x(static_cast<size_t>(tokens * cols), scale > 200 ? 0.001f : 1.0f);
      const Quantized q = Quantize(QuantizeRowsRef, x.data(), cols, tokens, cols);
      const std::vector<float> want = Multiply(Int8GemmRef, w.packed, q, tokens);
      for (int64_t o = 0; o < rows; ++o) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < cols; ++k) {
          const double wk = w.values[static_cast<size_t>(o * cols + k)];
          sum += double{x[0]} * wk;
          size += std::fabs(double{x[0]} * wk);
        }
        // All codes are 127, so that the scale's rounding is all the error, and the least float.
        ASSERT_NEAR(want[static_cast<size_t>(1 + o)], sum, 8 * kUnit * size + 0x1p-142) << scale;
      }
      ForEachWay([&] { EXPECT_TRUE(Identical(Multiply(Int8Gemm, w.packed, q, tokens), want)); });
    }
  }
}

// The largest sums that can be: all codes at their ends, on both sides and with both signs.
TEST(Int8Parity, TheLargestSums) {
  const int64_t rows = 64, cols = 64;
  std::vector<float> f(static_cast<size_t>(rows * cols)), x(static_cast<size_t>(9 * cols));
  for (size_t i = 0; i < f.size(); ++i) f[i] = i / 64 % 2 == 0 ? 127.0f : -127.0f;
  for (size_t i = 0; i < x.size(); ++i) x[i] = i / 64 % 3 == 0 ? -1.0f : 1.0f;
  Storage storage;
  std::byte* data = storage.Take(PackedBytes(WeightFormat::kInt8, rows, cols));
  PackInt8({WeightFormat::kF32, rows, cols, cols, f.data(), data, 0, 2});
  const PackedMatrix w = {WeightFormat::kInt8, rows, cols, data};
  for (const int64_t tokens : {1, 9}) {
    const Quantized q = Quantize(QuantizeRowsRef, x.data(), cols, tokens, cols);
    ForEachWay([&] {
      const std::vector<float> y = Multiply(Int8Gemm, w, q, tokens);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t o = 0; o < rows; ++o) {
          const float sign = (o % 2 == 0) == (t % 3 != 0) ? 1.0f : -1.0f;
          ASSERT_FLOAT_EQ(y[static_cast<size_t>(1 + t * (rows + 5) + o)], sign * 127 * 64);
        }
      }
    });
  }
}

// Against the product of the values themselves in float64. A code is off by at most half a step and the
// roundings of its quotient, 0.5001 in all, so a block adds at most 0.5001 xs sum |w|; the chain of n
// blocks rounds each term at most n + 2 times (scale, product of scales, additions).
TEST(Int8Accuracy, WithinTheBoundOfTheSteps) {
  Random random(5);
  for (const WeightFormat format : kFormats) {
    for (const int64_t cols : {32, 256, 2048}) {
      const int64_t rows = 37, tokens = 3, blocks = cols / 32;
      const Weights w = Make(format, rows, cols, random);
      const std::vector<float> x = random.Normal(tokens * cols);
      const Quantized q = Quantize(QuantizeRowsRef, x.data(), cols, tokens, cols);
      const std::vector<float> y = Multiply(Int8GemmRef, w.packed, q, tokens);
      double error = 0, power = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t o = 0; o < rows; ++o) {
          double sum = 0, slack = 0, size = 0;
          for (int64_t k = 0; k < cols; ++k) {
            const double wk = w.values[static_cast<size_t>(o * cols + k)];
            const double step = q.Scale(cols, t, k / 32);
            sum += x[static_cast<size_t>(t * cols + k)] * wk;
            slack += 0.5001 * step * std::fabs(wk);
            size += std::fabs(step * q.Code(cols, t, k) * wk);
          }
          const double got = y[static_cast<size_t>(1 + t * (rows + 5) + o)];
          ASSERT_NEAR(got, sum, slack + Gamma(static_cast<double>(blocks + 2)) * size);
          error += (got - sum) * (got - sum);
          power += sum * sum;
        }
      }
      // Errors of half a step at random: about 0.6 % of a normal row's size.
      EXPECT_LT(std::sqrt(error / power), 0.01);
      EXPECT_GT(error, 0);
    }
  }
}

TEST(Int8Splits, NoSplitOfTokensOrPanelsShows) {
  Random random(6);
  const int64_t rows = 150, cols = 160, tokens = 83;
  for (const WeightFormat format : kFormats) {
    const Weights w = Make(format, rows, cols, random);
    const std::vector<float> x = random.Normal(tokens * cols);
    const Quantized q = Quantize(QuantizeRowsRef, x.data(), cols, tokens, cols);
    ForEachWay([&] {
      const std::vector<float> whole = Multiply(Int8Gemm, w.packed, q, tokens);
      std::vector<float> parts(whole.size(), 77.0f);
      for (int64_t t = 0, count; t < tokens; t += count) {
        count = std::min<int64_t>(random.Int(1, 20), tokens - t);
        for (int64_t panel = 0, end; panel < w.packed.panels(); panel = end) {
          end = std::min(panel + random.Int(1, 3), w.packed.panels());
          Int8Gemm({.x = q.rows + t * Int8RowBytes(cols),
                    .w = w.packed,
                    .y = parts.data() + 1 + t * (rows + 5),
                    .y_stride = rows + 5,
                    .tokens = count,
                    .panel_begin = panel,
                    .panel_end = end});
        }
      }
      EXPECT_TRUE(Identical(parts, whole));
    });
  }
}

// What is not a number stays visible, in its row and in no other.
TEST(Int8Damage, ReachesEveryOutputOfItsRow) {
  Random random(7);
  const int64_t rows = 40, cols = 96;
  const Weights w = Make(WeightFormat::kInt8, rows, cols, random);
  for (const int64_t tokens : {3, 9}) {
    std::vector<float> x = random.Normal(tokens * cols);
    x[static_cast<size_t>(cols + 50)] = std::numeric_limits<float>::quiet_NaN();
    x[static_cast<size_t>(2 * cols + 3)] = std::numeric_limits<float>::infinity();
    const Quantized q = Quantize(QuantizeRows, x.data(), cols, tokens, cols);
    ForEachWay([&] {
      const std::vector<float> y = Multiply(Int8Gemm, w.packed, q, tokens);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t o = 0; o < rows; ++o) {
          ASSERT_EQ(std::isnan(y[static_cast<size_t>(1 + t * (rows + 5) + o)]), t == 1 || t == 2);
        }
      }
    });
  }
}

// The comparison must be able to fail: blocks added in another order give other bits, and so does the
// product of the floats.
TEST(Int8Canary, OtherOrdersAndFloatsAreDifferent) {
  Random random(8);
  const int64_t rows = 64, cols = 320;
  const Weights w = Make(WeightFormat::kInt8, rows, cols, random);
  const std::vector<float> x = random.Normal(cols);
  const Quantized q = Quantize(QuantizeRowsRef, x.data(), cols, 1, cols);
  const std::vector<float> y = Multiply(Int8Gemm, w.packed, q, 1);
  std::vector<float> floats(static_cast<size_t>(rows));
  GemmRef({x.data(), cols, w.packed, floats.data(), rows, 1, 0, w.packed.panels()});
  int order = 0, mode = 0;
  for (int64_t o = 0; o < rows; ++o) {
    float acc = 0.0f;
    for (int64_t b = cols / 32 - 1; b >= 0; --b) {
      double block =
          0;  // exact: integers times two scales of few bits, but for the product's rounding
      for (int64_t k = b * 32; k < (b + 1) * 32; ++k) {
        block += double{q.Scale(cols, 0, b)} * q.Code(cols, 0, k) *
                 w.values[static_cast<size_t>(o * cols + k)];
      }
      acc += static_cast<float>(block);
    }
    order += !SameBits(acc, y[static_cast<size_t>(1 + o)]);
    mode += !SameBits(floats[static_cast<size_t>(o)], y[static_cast<size_t>(1 + o)]);
  }
  EXPECT_GT(order, rows / 3);
  EXPECT_GT(mode, rows * 9 / 10);
}

}  // namespace
}  // namespace deltamesh::kernels
