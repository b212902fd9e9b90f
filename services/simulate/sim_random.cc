#include "services/simulate/sim_random.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

SimRandom::SimRandom(uint64_t seed, uint64_t stream)
    : bits_(SeededEntropy(seed).Next() ^ SeededEntropy(~stream).Next()) {}

double SimRandom::Uniform() { return static_cast<double>(bits_.Next() >> 11) * 0x1p-53; }

uint64_t SimRandom::Below(uint64_t n) {
  CHECK(n >= 1);
  return static_cast<uint64_t>(Uniform() * static_cast<double>(n));
}

double SimRandom::Exponential(double mean) { return -mean * std::log(1 - Uniform()); }

Quantiles::Quantiles(std::vector<Point> points) : points_(std::move(points)) {
  CHECK(!points_.empty());
  for (size_t i = 0; i < points_.size(); ++i) {
    CHECK(points_[i].value > 0 && (i == 0 || (points_[i].share > points_[i - 1].share &&
                                              points_[i].value >= points_[i - 1].value)));
  }
}

double Quantiles::At(double share) const {
  if (share <= points_.front().share) return points_.front().value;
  if (share >= points_.back().share) return points_.back().value;
  size_t i = 1;
  while (points_[i].share < share) ++i;
  const Point &low = points_[i - 1], &high = points_[i];
  const double t = (share - low.share) / (high.share - low.share);
  return low.value * std::pow(high.value / low.value, t);
}

}  // namespace deltamesh
