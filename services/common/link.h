// What both ends of Mesh.Link share.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace deltamesh {

// One stream as this process knows it; never reused within a process. 0 is none.
using LinkId = uint64_t;

struct LinkOptions {
  int64_t queue_max = 4096;                          // messages waiting to be written to one peer
  int64_t message_bytes_max = 64 << 20;              // a prompt of a million tokens is about 5 MiB
  absl::Duration keepalive_time = absl::Seconds(2);  // ping when silent for this long
  absl::Duration keepalive_timeout = absl::Seconds(4);
  absl::Duration backoff_min = absl::Milliseconds(100);  // client: first and longest pause before
  absl::Duration backoff_max = absl::Seconds(2);         // it dials again; pauses begin anew after
  absl::Duration lasting_min = absl::Seconds(5);         // a stream that lasted so long
};

}  // namespace deltamesh
