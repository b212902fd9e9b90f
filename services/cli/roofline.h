// The ceilings of this machine, measured beside a benchmark so that every figure can state its fraction.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace deltamesh {

struct Ceiling {
  double best = 0, median = 0;  // over repetitions, summed over threads
};

struct Roofline {
  Ceiling read_bytes_per_second;  // a buffer far larger than the caches, huge pages where allowed
  Ceiling fma_flops;              // float32, registers only
  Ceiling int8_ops;               // the same of 8-bit products, as the kernels take them
};

struct RooflineOptions {
  int threads = 1;
  int64_t buffer_bytes = int64_t{1} << 30;
  int repetitions = 5;
  double seconds = 0.2;  // per repetition and probe
  bool mxfp4 = false;    // 8-bit products are those of MXFP4 matrices, else of 8-bit ones
};

// Holds its buffer, so that a ceiling can be measured again beside the figure it is for: what a shared
// machine gives changes within seconds. Not thread-safe.
class RooflineProbe {
 public:
  // Measures all ceilings.
  static absl::StatusOr<std::unique_ptr<RooflineProbe>> Create(const RooflineOptions& options);
  ~RooflineProbe();

  const Roofline& roofline() const { return roofline_; }
  // As it is now, from one repetition of half the seconds.
  double ReadBytesPerSecond() const;
  double FmaFlops() const;
  double Int8Ops() const;

 private:
  class Buffer;
  explicit RooflineProbe(const RooflineOptions& options);
  double Read(int streams, double seconds) const;
  // Operations per second of a loop in registers.
  double Rate(double seconds, double (*loop)(int64_t rounds, bool mxfp4, float* sink)) const;

  const RooflineOptions options_;
  std::unique_ptr<Buffer> buffer_;
  int streams_ = 1;  // the access pattern that suits the machine
  Roofline roofline_;
};

}  // namespace deltamesh
