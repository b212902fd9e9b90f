// Tokens per second of a step loop, without a clock of its own: each step is given the time it began.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace deltamesh {

// Not thread-safe. Counts only back-to-back steps, so idle time does not lower the rate.
class TokenRate {
 public:
  void StepBegins(absl::Time now) {
    if (last_tokens_ > 0 && now > last_) {
      const double sample = static_cast<double>(last_tokens_) / absl::ToDoubleSeconds(now - last_);
      value_ = value_ == 0 ? sample : 0.9 * value_ + 0.1 * sample;
    }
    last_ = now;
    last_tokens_ = 0;
  }
  void StepEnded(int64_t tokens) { last_tokens_ = tokens; }
  void Idle() { last_tokens_ = 0; }
  double value() const { return value_; }  // 0 until known

 private:
  absl::Time last_ = absl::InfinitePast();
  int64_t last_tokens_ = 0;
  double value_ = 0;
};

}  // namespace deltamesh
