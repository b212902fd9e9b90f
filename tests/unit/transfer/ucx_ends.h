// Both ends of the UCX tests: a transport with a recorder, and a second process that can be killed.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>

#include "tests/unit/transfer/ucx_recorder.h"

namespace deltamesh {

using std::chrono::steady_clock;

inline double Since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

// A child process with pipes to its standard streams; killed at the end if it has not gone.
class Child {
 public:
  Child(const std::string& mode, const std::string& argument) {
    int in[2], out[2];
    CHECK(pipe(in) == 0 && pipe(out) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(in[0], STDIN_FILENO);
      dup2(out[1], STDOUT_FILENO);
      for (int fd : {in[0], in[1], out[0], out[1]}) close(fd);
      const std::string program = std::string(DELTAMESH_BINARY_DIR) + "/bin/transfer_ucx_peer";
      execl(program.c_str(), program.c_str(), mode.c_str(), argument.c_str(),
            static_cast<char*>(nullptr));
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    stdin_ = in[1];
    stdout_ = out[0];
  }
  ~Child() {
    if (pid_ > 0) Kill();
    close(stdout_);
  }

  std::string ReadLine() {
    std::string line;
    char c;
    while (read(stdout_, &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  void Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
    close(stdin_);
  }
  // Asks it to end and returns its exit status; -1 when it did not within 10 s.
  int End() {
    close(stdin_);
    const auto start = steady_clock::now();
    int status = -1;
    while (Since(start) < 10) {
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return status;
      }
      usleep(2000);
    }
    return -1;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  int stdin_, stdout_;
};

// A transport with a recorder for two types.
struct End {
  Recorder recorder;
  std::unique_ptr<UcxTransport> transport;

  explicit End(const UcxTransportOptions& options = LoopbackOptions())
      : transport(OpenLoopback(options)) {
    transport->SetHandler(MessageType::kProbe, &recorder);
    transport->SetHandler(MessageType::kHandoffSegment, &recorder);
  }
  ~End() { transport.reset(); }
};

}  // namespace deltamesh
