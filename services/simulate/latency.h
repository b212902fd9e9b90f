// Times of many requests, kept as counts in classes that are 0.2 % wide: a day takes no more memory than an
// hour.
#pragma once

#include <cstdint>
#include <vector>

namespace deltamesh {

class Latency {
 public:
  void Add(double seconds);
  // The time that `share` of all did not exceed, to 0.2 %; 0 without any.
  double Percentile(double share) const;
  int64_t count() const { return count_; }
  double mean() const { return count_ > 0 ? sum_ / static_cast<double>(count_) : 0; }

 private:
  static constexpr int kClasses = 14000;  // from 0.1 ms to beyond a year
  std::vector<int64_t> counts_ = std::vector<int64_t>(kClasses);
  int64_t count_ = 0;
  double sum_ = 0;
};

}  // namespace deltamesh
