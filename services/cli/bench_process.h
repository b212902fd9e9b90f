// One more process of this binary under a benchmark, for as long as this object lives.
//
// Not thread-safe; belongs to the main thread (the child ends with the thread that started it).
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "services/cli/children.h"
#include "services/cli/run_folder.h"

namespace deltamesh {

class BenchProcess {
 public:
  // `args`: of a role that tells its ports. Its ports are known when it returns. Errors, of AwaitServing too,
  // hold the last words of what was not up within `longest`.
  static absl::StatusOr<std::unique_ptr<BenchProcess>> Start(const std::string& name,
                                                             std::vector<std::string> args,
                                                             absl::Duration longest);
  ~BenchProcess();
  BenchProcess(const BenchProcess&) = delete;
  BenchProcess& operator=(const BenchProcess&) = delete;

  absl::Status AwaitServing();
  // Its addresses, host:port.
  const std::string& grpc() const { return grpc_; }
  const std::string& http() const { return http_; }
  pid_t pid() const { return children_.pid(name_); }

 private:
  BenchProcess(std::string name, std::unique_ptr<RunFolder> folder, absl::Duration longest);
  template <typename Done>
  absl::Status Await(const char* what, Done done);

  const std::string name_;
  const std::unique_ptr<RunFolder> folder_;
  const absl::Duration longest_;
  Children children_;
  std::string grpc_, http_;
};

}  // namespace deltamesh
