// Element types and the constants that fix the order of every reduction.
#pragma once

#include <bit>
#include <cstdint>

namespace deltamesh::kernels {

// Number of virtual lanes of a sum across a vector (norms, attention scores), whatever the register
// width: lane l takes elements l, l + 16, l + 32, ... by fused multiply-add in ascending order,
// missing elements count as +0, and the lanes are added by the tree of ReduceLanes.
inline constexpr int64_t kLanes = 16;

// Outputs of one packed panel. Each output of a matrix product is its own chain over ascending k,
// so the panel width never shows in the bits.
inline constexpr int64_t kPanel = 32;

// Tokens of a KDA tile: the recurrent state changes only at multiples of it.
inline constexpr int64_t kTile = 16;

// Positions of a latent block, and of a span: attention runs an online softmax over the blocks of
// one span in ascending order and merges spans in ascending order.
inline constexpr int64_t kBlock = 64;
inline constexpr int64_t kSpanBlocks = 8;

inline constexpr int64_t kMxBlock = 32;  // columns that share one scale, MXFP4 or 8-bit

enum class WeightFormat : uint8_t { kF32 = 0, kBf16 = 1, kMxfp4 = 2, kInt8 = 3 };

inline float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Round to nearest, ties to even.
inline uint16_t FloatToBf16(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((uint64_t{u} + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

// The E8M0 scale 2^(code - 127) of MXFP4; 0 gives the subnormal 2^-127. 255 (NaN) must have been
// refused.
inline float MxScale(uint8_t code) {
  return std::bit_cast<float>(code == 0 ? 0x00400000u : uint32_t{code} << 23);
}

// The fixed tree over 16 lanes: halves are added to halves. `lanes` is used as scratch.
inline float ReduceLanes(float* lanes /*[16]*/) {
  for (int64_t half = kLanes / 2; half >= 1; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace deltamesh::kernels
