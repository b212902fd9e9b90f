// How fast waiting requests get their place: cost that was placed per second of waiting, mostly of late.
//
// Only time in which somebody waited counts, and only requests that did: what finds room at once says nothing
// about how long a queue takes.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace deltamesh {

class DrainRate {
 public:
  // Time went on to `now`; before what happens then. `waiting`: somebody waited since the last call.
  void Pass(absl::Time now, bool waiting) {
    if (waiting && now > last_) busy_ += absl::ToDoubleSeconds(now - last_);
    last_ = now;
    if (busy_ < kWindowSeconds) return;
    busy_ /= 2;
    tokens_ /= 2;
  }
  // A request that had waited got its place.
  void Placed(int64_t tokens) { tokens_ += static_cast<double>(tokens); }

  // 0: not known yet.
  double tokens_per_second() const { return busy_ < kLeastSeconds ? 0 : tokens_ / busy_; }

 private:
  static constexpr double kWindowSeconds = 30, kLeastSeconds = 0.5;

  absl::Time last_ = absl::InfiniteFuture();
  double busy_ = 0, tokens_ = 0;
};

}  // namespace deltamesh
