// Random numbers of simulated traffic: the same seed gives the same traffic.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/base/random.h"

namespace deltamesh {

class SimRandom {
 public:
  // Streams of one seed are independent of each other, so that no draw of one moves another.
  SimRandom(uint64_t seed, uint64_t stream);

  double Uniform();            // [0, 1)
  uint64_t Below(uint64_t n);  // n >= 1
  double Exponential(double mean);
  uint64_t Bits() { return bits_.Next(); }

 private:
  SeededEntropy bits_;
};

// A distribution given by some of its quantiles: between them the logarithm grows evenly.
class Quantiles {
 public:
  struct Point {
    double share, value;  // values above 0, ascending like the shares
  };
  explicit Quantiles(std::vector<Point> points);

  // The value below which `share` of all lie; outside of the points their first or last.
  double At(double share) const;
  double Draw(SimRandom& random) const { return At(random.Uniform()); }

 private:
  std::vector<Point> points_;
};

}  // namespace deltamesh
