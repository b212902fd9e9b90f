// A real S3 server on loopback for a test program: s3_server.py in the environment that ./dev test makes.
// Every test of one runs against moto and, where DELTAMESH_TEST_S3_SERVER names one, against that program.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "runtime/store/s3_client.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh::testing {

// "": moto.
inline std::vector<std::string> S3Programs() {
  const char* program = getenv("DELTAMESH_TEST_S3_SERVER");
  if (program == nullptr || *program == 0) return {""};
  return {"", program};
}
inline std::string S3ProgramName(const std::string& program) {
  return program.empty() ? "moto" : "program";
}

class S3Server {
 public:
  explicit S3Server(const std::string& program) {
    for (const char* proxy : {"http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"})
      unsetenv(proxy);
    const std::string python = std::string(DELTAMESH_BINARY_DIR) + "/venv/bin/python";
    CHECK(access(python.c_str(), X_OK) == 0,
          "%s is not there: run `./dev test` once, which makes it", python);
    const std::string script = std::string(DELTAMESH_SOURCE_DIR) + "/tests/unit/store/s3_server.py";
    const std::string out = folder_.path + "/out";
    int input[2];
    CHECK(pipe(input) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(input[0], 0);
      close(input[0]);
      close(input[1]);
      execl(python.c_str(), python.c_str(), "-B", script.c_str(), out.c_str(),
            program.empty() ? nullptr : program.c_str(), nullptr);
      _exit(127);
    }
    close(input[0]);
    input_ = input[1];
    for (int i = 0; access(out.c_str(), R_OK) != 0; ++i) {
      CHECK(i < 600 && waitpid(pid_, nullptr, WNOHANG) == 0,
            "the S3 server did not start; run `./dev test`, "
            "which installs it");
      absl::SleepFor(absl::Milliseconds(100));
    }
    std::ifstream in(out);
    for (std::string line; std::getline(in, line);) {
      said_[line.substr(0, line.find('='))] = line.substr(line.find('=') + 1);
    }
  }
  ~S3Server() { Stop(); }

  void Stop() {
    if (pid_ == 0) return;
    close(input_);
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  // Answers nothing, and does not close what is open. After a signal alone threads run on for a while.
  void Freeze() {
    kill(pid_, SIGSTOP);
    waitpid(pid_, nullptr, WUNTRACED);
  }
  void Thaw() { kill(pid_, SIGCONT); }

  S3Options Options(const std::string& prefix) const {
    auto options = ParseS3(said_.at("address") + "/" + said_.at("bucket") + "/" + prefix,
                           [this](const char* name) -> std::string {
                             if (std::string(name) == "AWS_ACCESS_KEY_ID")
                               return said_.at("access_key");
                             if (std::string(name) == "AWS_SECRET_ACCESS_KEY")
                               return said_.at("secret_key");
                             return "";
                           });
    CHECK_OK(options.status());
    return *std::move(options);
  }

 private:
  TestFolder folder_;
  pid_t pid_ = 0;
  int input_ = -1;
  std::map<std::string, std::string> said_;
};

}  // namespace deltamesh::testing
