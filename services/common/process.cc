#include "services/common/process.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

sigset_t WaitedSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

}  // namespace

SignalWaiter::SignalWaiter() {
  const sigset_t set = WaitedSignals();
  CHECK(pthread_sigmask(SIG_BLOCK, &set, nullptr) == 0);
  signal(SIGPIPE, SIG_IGN);
}

int SignalWaiter::Wait(absl::Duration timeout) const {
  const sigset_t set = WaitedSignals();
  const timespec spec = absl::ToTimespec(timeout);
  const int got = sigtimedwait(&set, nullptr, &spec);
  return got > 0 ? got : 0;
}

void DieWithParent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);
}

void RestoreCrashSignals() {
  for (int signal_number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) signal(signal_number, SIG_DFL);
}

}  // namespace deltamesh
