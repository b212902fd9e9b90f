// Time comes in through the constructor, so that tests can own it.
#pragma once

#include "absl/time/time.h"

namespace deltamesh {

// Thread-safe. Now() never goes backwards.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
};

// Wall time at construction plus a monotonic clock since then.
class SystemClock final : public Clock {
 public:
  SystemClock();
  absl::Time Now() const override;

 private:
  absl::Time start_wall_;
  int64_t start_monotonic_ns_;
};

}  // namespace deltamesh
