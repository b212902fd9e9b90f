#include "services/cli/bench_scratch.h"

#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>

#include "absl/time/clock.h"
#include "runtime/base/status.h"
#include "services/cli/random_model.h"

namespace deltamesh {
namespace {

// A mesh whose starter is gone stops by itself within it.
constexpr absl::Duration kGrace = absl::Seconds(15);

// Reaps what has ended; whether the child was among it. Sets `none` when there is nothing left to wait for.
bool ReapSome(pid_t child, int* status, bool* none) {
  bool ended = false;
  for (;;) {
    int how = 0;
    const pid_t pid = waitpid(-1, &how, WNOHANG);
    if (pid < 0 && errno == EINTR) continue;
    *none = pid < 0;
    if (pid <= 0) return ended;
    if (pid == child) {
      *status = how;
      ended = true;
    }
  }
}

// Returns how the child ended, once all that it started has ended too or had its time.
int AwaitAll(pid_t child, const sigset_t& signals) {
  int status = 0;
  bool ended = false, none = false;
  absl::Time until = absl::InfiniteFuture();
  for (;;) {
    if (ReapSome(child, &status, &none)) {
      ended = true;
      until = absl::Now() + kGrace;
    }
    if (none || absl::Now() >= until) return status;
    const timespec wait = absl::ToTimespec(absl::Milliseconds(500));
    const int got = sigtimedwait(&signals, nullptr, &wait);
    if (got > 0 && got != SIGCHLD && !ended) kill(child, got);
  }
}

[[noreturn]] void EndAs(int status) {
  if (WIFSIGNALED(status)) {
    const rlimit no_second_dump{};
    setrlimit(RLIMIT_CORE, &no_second_dump);
    signal(WTERMSIG(status), SIG_DFL);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, WTERMSIG(status));
    raise(WTERMSIG(status));
    sigprocmask(SIG_UNBLOCK, &one, nullptr);
  }
  _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

}  // namespace

absl::Status ContinueInScratch() {
  ASSIGN_OR_RETURN(std::unique_ptr<ScratchFolder> scratch, ScratchFolder::Create());
  sigset_t signals, before;
  sigemptyset(&signals);
  for (const int signal_number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
    sigaddset(&signals, signal_number);
  }
  sigprocmask(SIG_BLOCK, &signals, &before);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // so that it can wait for what the child leaves
  const pid_t parent = getpid(), child = fork();
  if (child < 0) {
    sigprocmask(SIG_SETMASK, &before, nullptr);
    return ResourceExhausted("the measuring process cannot be started (%s)", strerror(errno));
  }
  if (child > 0) {
    const int status = AwaitAll(child, signals);
    scratch.reset();
    EndAs(status);
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  setenv("TMPDIR", scratch.release()->path().c_str(), 1);  // the parent removes it
  return absl::OkStatus();
}

}  // namespace deltamesh
