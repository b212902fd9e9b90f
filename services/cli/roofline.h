// The ceilings of this machine, measured before a benchmark so that every figure can state its fraction.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace deltamesh {

struct Ceiling {
  double best = 0, median = 0;  // over repetitions, summed over threads
};

struct Roofline {
  int threads = 1;
  Ceiling read_bytes_per_second;  // a buffer far larger than the caches, huge pages where allowed
  Ceiling fma_flops;              // float32, registers only
};

struct RooflineOptions {
  int threads = 1;
  int64_t buffer_bytes = int64_t{1} << 30;
  int repetitions = 5;
  double seconds = 0.2;  // per repetition and probe
};

absl::StatusOr<Roofline> MeasureRoofline(const RooflineOptions& options);

}  // namespace deltamesh
