#include "services/simulate/latency.h"

#include <algorithm>
#include <cmath>

namespace deltamesh {
namespace {

constexpr double kFirst = 1e-4, kWidth = 1.002;

}  // namespace

void Latency::Add(double seconds) {
  const double place = std::log(std::max(seconds, kFirst) / kFirst) / std::log(kWidth);
  ++counts_[static_cast<size_t>(std::min(place, kClasses - 1.0))];
  ++count_;
  sum_ += seconds;
}

double Latency::Percentile(double share) const {
  const double wanted = share * static_cast<double>(count_);
  int64_t below = 0;
  for (int i = 0; i < kClasses; ++i) {
    below += counts_[static_cast<size_t>(i)];
    if (below > 0 && static_cast<double>(below) >= wanted) return kFirst * std::pow(kWidth, i + 1);
  }
  return 0;
}

}  // namespace deltamesh
