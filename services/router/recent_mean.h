// The mean of what is seen once a request: of all while they are few, then mostly of the last 32.
#pragma once

#include <algorithm>
#include <cstdint>

namespace deltamesh {

class RecentMean {
 public:
  void Seen(double value) {
    ++seen_;
    value_ += (value - value_) / static_cast<double>(std::min<int64_t>(seen_, 32));
  }
  // 0: nothing was seen.
  double value() const { return value_; }

 private:
  int64_t seen_ = 0;
  double value_ = 0;
};

}  // namespace deltamesh
