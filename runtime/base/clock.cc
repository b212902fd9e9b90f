#include "runtime/base/clock.h"

#include <chrono>

#include "absl/time/clock.h"

namespace deltamesh {
namespace {

int64_t MonotonicNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

SystemClock::SystemClock() : start_wall_(absl::Now()), start_monotonic_ns_(MonotonicNs()) {}

absl::Time SystemClock::Now() const {
  return start_wall_ + absl::Nanoseconds(MonotonicNs() - start_monotonic_ns_);
}

}  // namespace deltamesh
