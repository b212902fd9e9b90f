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

// Whether hang-ups were ignored when this process began, as nohup has it. UCX's library takes the signal for
// itself when it is loaded, so this looks before any library's constructor runs.
bool hang_up_ignored = false;

void LookAtStart(int, char**, char**) {
  struct sigaction action {};
  hang_up_ignored = sigaction(SIGHUP, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}
__attribute__((section(".preinit_array"), used)) void (*const kLookAtStart)(int, char**,
                                                                            char**) = LookAtStart;

sigset_t WaitedSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  if (!hang_up_ignored) sigaddset(&set, SIGHUP);
  return set;
}

}  // namespace

SignalWaiter::SignalWaiter() {
  const sigset_t set = WaitedSignals();
  CHECK(pthread_sigmask(SIG_BLOCK, &set, nullptr) == 0);
  signal(SIGPIPE, SIG_IGN);
  if (hang_up_ignored) signal(SIGHUP, SIG_IGN);
}

int SignalWaiter::Wait(absl::Duration timeout) const {
  const sigset_t set = WaitedSignals();
  const timespec spec = absl::ToTimespec(timeout);
  const int got = sigtimedwait(&set, nullptr, &spec);
  if (got == SIGHUP) return SIGTERM;
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
