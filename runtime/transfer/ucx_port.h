// The TCP port that UCX opens for its data: which one it is, and strangers who connect to it and say
// nothing. UCX closes a connection whose first eight bytes are not its own, but waits for them without
// end, and stops listening for good once the process has no file descriptor left.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace deltamesh {

// A port of `host` nobody has: `port`, or any when it is 0. UNAVAILABLE names the address and the cause.
absl::StatusOr<int> FindFreePort(const std::string& host, int port);

// Allows this process as many file descriptors as the system lets it have.
void RaiseFileLimit();

struct StrangerSweep {
  bool listening = false;  // somebody in this process listens at the port
  int64_t cut = 0;
  int64_t silent = 0;  // that may still speak
};

// Shuts down the connections this process accepted at `port` that have sent fewer than eight bytes and
// none for `silence`, and of the others beyond `most` those that have waited longest.
StrangerSweep CutStrangers(int port, absl::Duration silence, int64_t most);

}  // namespace deltamesh
