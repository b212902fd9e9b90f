// Randomness comes in through the constructor. Two sources:
//  * Entropy: unguessable numbers for transfer ids and tokens (seeded in tests).
//  * Philox: a counter-based generator; the same (seed, position, stream) gives the same number on
//    every machine, which is what lets a moved sequence sample the same token.
#pragma once

#include <array>
#include <cstdint>

namespace deltamesh {

// Not thread-safe unless the implementation says so.
class Entropy {
 public:
  virtual ~Entropy() = default;
  virtual uint64_t Next() = 0;
};

// Reads the kernel's generator. Thread-safe.
class SystemEntropy final : public Entropy {
 public:
  uint64_t Next() override;
};

// SplitMix64; reproducible. For tests and simulation.
class SeededEntropy final : public Entropy {
 public:
  explicit SeededEntropy(uint64_t seed) : state_(seed) {}
  uint64_t Next() override;

 private:
  uint64_t state_;
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Uniform in [0, 1) with 24 random bits, keyed by (seed, position, stream).
float PhiloxUniform(uint64_t seed, uint64_t position, uint32_t stream);

}  // namespace deltamesh
