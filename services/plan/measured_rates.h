// Rates of a worker from what `deltamesh bench --json` wrote.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace deltamesh {

struct MeasuredRates {
  double prefill = 0;  // prompt tokens per second, of the longest prompt measured; 0: none was
  double decode = 0;   // of the most sequences decoded at once, together
  double stream = 0;   // of one of them
};

// Errors name the file and what it lacks.
absl::StatusOr<MeasuredRates> ReadMeasuredRates(const std::string& path);

}  // namespace deltamesh
