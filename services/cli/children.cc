#include "services/cli/children.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "absl/time/clock.h"
#include "runtime/base/status.h"

extern char** environ;

namespace deltamesh {
namespace {

std::string Describe(int status) {
  if (WIFEXITED(status)) return absl::StrFormat("exit code %d", WEXITSTATUS(status));
  if (!WIFSIGNALED(status)) return absl::StrFormat("status %d", status);
  return absl::StrFormat("signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
}

}  // namespace

Children::~Children() { StopAll(absl::ZeroDuration()); }

absl::Status Children::Start(const std::string& name, std::vector<std::string> args) {
  args.insert(args.begin(), "deltamesh");
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  const std::string log = log_path(name);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);  // the parent blocks what it waits for
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);

  pid_t pid = 0;
  const int error = posix_spawn(&pid, "/proc/self/exe", &files, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return Unavailable("%s: cannot be started: %s", name, strerror(error));
  children_.push_back({name, pid});
  return absl::OkStatus();
}

pid_t Children::pid(const std::string& name) const {
  for (const Child& child : children_) {
    if (child.name == name && child.pid != 0) return child.pid;
  }
  return 0;
}

std::optional<Children::Exit> Children::Reap() {
  for (Child& child : children_) {
    int status = 0;
    if (child.pid == 0 || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
    child.pid = 0;
    return Exit{child.name, Describe(status)};
  }
  return std::nullopt;
}

void Children::StopAll(absl::Duration grace) {
  for (const Child& child : children_) {
    if (child.pid != 0) kill(child.pid, SIGTERM);
  }
  const absl::Time until = absl::Now() + grace;
  while (alive() > 0 && absl::Now() < until) {
    if (!Reap()) absl::SleepFor(absl::Milliseconds(20));
  }
  for (Child& child : children_) {
    if (child.pid == 0) continue;
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
    child.pid = 0;
  }
}

std::vector<std::string> Children::Tail(const std::string& name, size_t lines) const {
  std::ifstream in(log_path(name));
  std::vector<std::string> out;
  for (std::string line; std::getline(in, line);) {
    out.push_back(std::move(line));
    if (out.size() > lines) out.erase(out.begin());
  }
  return out;
}

size_t Children::alive() const {
  return static_cast<size_t>(
      std::count_if(children_.begin(), children_.end(), [](const Child& c) { return c.pid != 0; }));
}

}  // namespace deltamesh
