// A child process that is this binary again, with a line protocol over its standard streams.
//
// Not thread-safe. A child that reads its input ends when this object does; it is killed if it does not.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace deltamesh {

class PipedChild {
 public:
  // `deltamesh args...`; its standard error is this process's.
  static absl::StatusOr<std::unique_ptr<PipedChild>> Start(std::vector<std::string> args);
  ~PipedChild();
  PipedChild(const PipedChild&) = delete;
  PipedChild& operator=(const PipedChild&) = delete;

  absl::Status WriteLine(std::string line);
  // UNAVAILABLE when the child closed its output, DEADLINE_EXCEEDED after `timeout`.
  absl::StatusOr<std::string> ReadLine(absl::Duration timeout);

 private:
  PipedChild() = default;
  pid_t pid_ = 0;
  int in_ = -1, out_ = -1;
  std::string read_;  // beyond the last line
};

// Runs another program with the given environment until it ends; its output, both streams. NOT_FOUND when it
// is not installed, DEADLINE_EXCEEDED after `timeout` (it is killed).
struct Program {
  std::vector<std::string> args;  // the first is looked up in PATH
  std::vector<std::string> environment;
};
class RunningProgram {
 public:
  static absl::StatusOr<std::unique_ptr<RunningProgram>> Start(const Program& program);
  ~RunningProgram();  // kills it if it runs
  absl::StatusOr<std::string> Wait(absl::Duration timeout);

 private:
  RunningProgram() = default;
  pid_t pid_ = 0;
  int out_ = -1;
};

}  // namespace deltamesh
