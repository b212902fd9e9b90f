#include "services/cli/bench_process.h"

#include <unistd.h>

#include <fstream>
#include <utility>

#include "absl/time/clock.h"
#include "runtime/base/status.h"
#include "services/cli/first_answer.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kStopMax = absl::Seconds(10);

}  // namespace

BenchProcess::BenchProcess(std::string name, std::unique_ptr<RunFolder> folder,
                           absl::Duration longest)
    : name_(std::move(name)),
      folder_(std::move(folder)),
      longest_(longest),
      children_(folder_->path()) {}

BenchProcess::~BenchProcess() { children_.StopAll(kStopMax); }

absl::StatusOr<std::unique_ptr<BenchProcess>> BenchProcess::Start(const std::string& name,
                                                                  std::vector<std::string> args,
                                                                  absl::Duration longest) {
  ASSIGN_OR_RETURN(auto folder, RunFolder::Create());
  const std::string ports = folder->path() + "/ports";
  std::unique_ptr<BenchProcess> process(new BenchProcess(name, std::move(folder), longest));
  args.push_back("--ports-file=" + ports);
  args.push_back("--parent=" + std::to_string(getpid()));
  RETURN_IF_ERROR(process->children_.Start(name, std::move(args)));
  RETURN_IF_ERROR(process->Await("up", [&] {
    std::ifstream in(ports);
    for (std::string line; std::getline(in, line);) {
      if (line.starts_with("grpc=")) process->grpc_ = line.substr(5);
      if (line.starts_with("http=")) process->http_ = line.substr(5);
    }
    return !process->grpc_.empty() && !process->http_.empty();
  }));
  return process;
}

absl::Status BenchProcess::AwaitServing() {
  return Await("ready", [this] { return IsServing(grpc_); });
}

template <typename Done>
absl::Status BenchProcess::Await(const char* what, Done done) {
  const absl::Time until = absl::Now() + longest_;
  while (!done()) {
    const auto exit = children_.Reap();
    if (exit || absl::Now() > until) {
      std::string words;
      for (const std::string& line : children_.Tail(name_, 8)) words += "\n  | " + line;
      if (!exit) {
        return DeadlineExceeded("the benchmark's %s was not %s in time. Its last words:%s", name_,
                                what, words);
      }
      return Unavailable("the benchmark's %s was not %s: %s. Its last words:%s", name_, what,
                         exit->how, words);
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
