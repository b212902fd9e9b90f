// The ceiling of a hand-off: what a connection between two processes on loopback carries.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace deltamesh {

struct LinkRate {
  std::string name;  // what was measured
  double bytes_per_second = 0;
};

// Messages of `message_bytes`, about `bytes` in all. `ucx_perftest` (active messages over tcp) where it is
// installed, else one TCP connection between two threads.
absl::StatusOr<LinkRate> MeasureLink(int64_t message_bytes, int64_t bytes);

// The second way alone.
absl::StatusOr<LinkRate> MeasureTcp(int64_t message_bytes, int64_t bytes);

}  // namespace deltamesh
