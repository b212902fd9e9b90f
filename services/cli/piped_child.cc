#include "services/cli/piped_child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "absl/time/clock.h"
#include "runtime/base/status.h"

extern char** environ;

namespace deltamesh {
namespace {

constexpr absl::Duration kGrace = absl::Seconds(2);

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& s : strings) out.push_back(s.data());
  out.push_back(nullptr);
  return out;
}

// What the new process does: only calls that are safe between fork and exec. Returns when that failed, with
// an errno.
int Become(const char* program, char* const* argv, char* const* environment, int in, int out,
           bool errors, pid_t parent) {
  sigset_t none;
  sigemptyset(&none);
  // Whoever ends this process by a signal ends its children too; it may be gone already.
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (getppid() != parent) return ESRCH;
  if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || (errors && dup2(out, 2) < 0)) return errno;
  if (sigprocmask(SIG_SETMASK, &none, nullptr) != 0) return errno;
  execvpe(program, argv, environment);
  return errno;
}

// Starts `program` with `in` and `out` as standard input and output (and, with `errors`, standard error), and
// no signal blocked. It is killed when the calling thread ends. Returns an errno.
int Spawn(pid_t* pid, const char* program, std::vector<std::string> args, char** environment,
          int in, int out, bool errors) {
  std::vector<char*> argv = Pointers(args);
  int failed[2];
  if (pipe2(failed, O_CLOEXEC) != 0) return errno;
  const pid_t parent = getpid();
  *pid = fork();
  if (*pid == 0) {
    const int error = Become(program, argv.data(), environment, in, out, errors, parent);
    [[maybe_unused]] const ssize_t told = write(failed[1], &error, sizeof(error));
    _exit(127);
  }
  int error = *pid < 0 ? errno : 0;
  close(failed[1]);
  if (*pid > 0 && read(failed[0], &error, sizeof(error)) == sizeof(error)) {
    waitpid(*pid, nullptr, 0);
  }
  close(failed[0]);
  return error;
}

// Waits for the end of `pid`; false when it still runs after `grace`.
bool Reaped(pid_t pid, absl::Duration grace) {
  for (const absl::Time until = absl::Now() + grace;;) {
    const pid_t got = waitpid(pid, nullptr, WNOHANG);
    if (got == pid || (got < 0 && errno != EINTR)) return true;
    if (absl::Now() >= until) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
}

void Reap(pid_t pid, absl::Duration grace) {
  if (Reaped(pid, grace)) return;
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

// Appends what comes within `until` to `out`; 0 at the end of the input, negative when time is up.
int ReadSome(int fd, absl::Time until, std::string* out) {
  for (;;) {
    const int64_t left = std::max<int64_t>(0, absl::ToInt64Milliseconds(until - absl::Now()));
    pollfd poll_fd{.fd = fd, .events = POLLIN, .revents = 0};
    const int ready = poll(&poll_fd, 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0 && absl::Now() >= until) return -1;
    if (ready <= 0) continue;
    char buffer[4096];
    const ssize_t n = read(fd, buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) out->append(buffer, static_cast<size_t>(n));
    return n > 0 ? 1 : 0;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<PipedChild>> PipedChild::Start(std::vector<std::string> args) {
  std::unique_ptr<PipedChild> child(new PipedChild);
  int in[2], out[2];
  // Sockets, since writing to one whose reader has died can be told not to raise a signal.
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) != 0) {
    return ResourceExhausted("a child's input cannot be opened (%s)", strerror(errno));
  }
  child->in_ = in[1];
  if (pipe2(out, O_CLOEXEC) != 0) {
    close(in[0]);
    return ResourceExhausted("a child's output cannot be opened (%s)", strerror(errno));
  }
  child->out_ = out[0];
  args.insert(args.begin(), "deltamesh");
  const int error =
      Spawn(&child->pid_, "/proc/self/exe", std::move(args), environ, in[0], out[1], false);
  close(in[0]);
  close(out[1]);
  if (error != 0) {
    child->pid_ = 0;
    return Unavailable("a child cannot be started (%s)", strerror(error));
  }
  return child;
}

PipedChild::~PipedChild() {
  if (in_ >= 0) close(in_);
  if (pid_ > 0) Reap(pid_, kGrace);
  if (out_ >= 0) close(out_);
}

absl::Status PipedChild::WriteLine(std::string line) {
  line += '\n';
  for (std::string_view rest = line; !rest.empty();) {
    const ssize_t n = send(in_, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Unavailable("a child takes no input any more (%s)", strerror(errno));
    rest.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> PipedChild::ReadLine(absl::Duration timeout) {
  const absl::Time until = absl::Now() + timeout;
  for (;;) {
    if (const size_t end = read_.find('\n'); end != std::string::npos) {
      std::string line = read_.substr(0, end);
      read_.erase(0, end + 1);
      return line;
    }
    const int got = ReadSome(out_, until, &read_);
    if (got == 0) return Unavailable("a child ended without an answer; see its message above");
    if (got < 0)
      return DeadlineExceeded("a child said nothing for %s", absl::FormatDuration(timeout));
  }
}

absl::StatusOr<std::unique_ptr<RunningProgram>> RunningProgram::Start(const Program& program) {
  std::unique_ptr<RunningProgram> running(new RunningProgram);
  int out[2];
  if (pipe2(out, O_CLOEXEC) != 0) {
    return ResourceExhausted("a program's output cannot be opened (%s)", strerror(errno));
  }
  running->out_ = out[0];
  std::vector<std::string> environment = program.environment;
  std::vector<char*> variables = Pointers(environment);
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int error = nothing < 0 ? errno
                                : Spawn(&running->pid_, program.args.front().c_str(), program.args,
                                        variables.data(), nothing, out[1], true);
  if (nothing >= 0) close(nothing);
  close(out[1]);
  if (error != 0) {
    running->pid_ = 0;
    return NotFound("%s: cannot be started (%s)", program.args.front(), strerror(error));
  }
  return running;
}

RunningProgram::~RunningProgram() {
  if (pid_ > 0) Reap(pid_, absl::ZeroDuration());
  if (out_ >= 0) close(out_);
}

absl::StatusOr<std::string> RunningProgram::Wait(absl::Duration timeout) {
  const absl::Time until = absl::Now() + timeout;
  std::string text;
  for (int got = 1; got != 0;) {
    got = ReadSome(out_, until, &text);
    if (got < 0)
      return DeadlineExceeded("a program ran for more than %s", absl::FormatDuration(timeout));
  }
  Reap(pid_, kGrace);
  pid_ = 0;
  return text;
}

}  // namespace deltamesh
