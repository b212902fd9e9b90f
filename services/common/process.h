// What a main needs from the system: signals as values, and children that never outlive their parent.
#pragma once

#include <sys/types.h>

#include "absl/time/time.h"

namespace deltamesh {

// SIGINT, SIGTERM and SIGHUP, which counts as SIGTERM, to wait for. Create it before any other thread: they
// inherit the blocked mask, so that none of them takes the default action. SIGPIPE is ignored.
class SignalWaiter {
 public:
  SignalWaiter();

  // The signal that arrived, or 0 after `timeout`. One thread waits at a time.
  int Wait(absl::Duration timeout) const;
};

// Asks the kernel to send SIGTERM to this process when its parent dies. `parent` is the parent's id as the
// parent knows it: if it has died already, the process ends at once. Must be called from the child's main
// thread, and the parent must have forked on a thread that lives as long as it does.
void DieWithParent(pid_t parent);

// Removes the signal handlers that libraries installed for crashes, so that a crash dumps core as usual.
void RestoreCrashSignals();

}  // namespace deltamesh
