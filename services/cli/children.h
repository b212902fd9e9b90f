// Child processes of `deltamesh serve`: started from this very binary, logging into files, none of them
// outliving the parent.
//
// Not thread-safe; belongs to the main thread (a child dies with the thread that started it).
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace deltamesh {

class Children {
 public:
  // Logs go to `log_folder`/NAME.log.
  explicit Children(std::string log_folder) : log_folder_(std::move(log_folder)) {}
  ~Children();  // StopAll with no grace

  // Starts `deltamesh args...` in a process group of its own, so that Ctrl-C in the terminal reaches the
  // parent only.
  absl::Status Start(const std::string& name, std::vector<std::string> args);

  struct Exit {
    std::string name;
    std::string how;  // "exit code 1", "signal 9 (Killed)"
  };
  // A child that ended since the last call.
  std::optional<Exit> Reap();

  // SIGTERM to all; SIGKILL to those alive after `grace`. Waits for all.
  void StopAll(absl::Duration grace);

  std::string log_path(const std::string& name) const { return log_folder_ + "/" + name + ".log"; }
  // Up to `lines` last lines of a child's log.
  std::vector<std::string> Tail(const std::string& name, size_t lines) const;
  size_t alive() const;
  pid_t pid(const std::string& name) const;  // 0: none of this name lives

 private:
  struct Child {
    std::string name;
    pid_t pid = 0;  // 0: ended
  };
  const std::string log_folder_;
  std::vector<Child> children_;
};

}  // namespace deltamesh
