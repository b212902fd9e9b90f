// A whole mesh on this machine for as long as this object lives: `deltamesh serve` as a child, on free ports.
//
// Not thread-safe; belongs to the main thread (the child ends with the thread that started it).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "services/cli/children.h"
#include "services/cli/run_folder.h"

namespace deltamesh {

struct LocalMeshOptions {
  std::string model;           // checkpoint folder
  std::string name = "bench";  // as clients name it; the folder's need not be UTF-8
  int threads = 2;             // of each worker
  int experts = 2;             // shards; 0: experts in each worker
  int64_t sequences = 1;       // that run at once
  std::string weights = "stored";
  std::string activations = "float";
  std::string packed_dir = "auto";
  std::vector<std::string> flags;  // more of `serve`: "--worker-flag=--slabs=8"
  absl::Duration ready_max = absl::Minutes(5);
  std::function<bool()> stop;  // asked while it starts; true gives it up with CANCELLED
};

class LocalMesh {
 public:
  // Ready when it returns. The error holds the last words of what could not start.
  static absl::StatusOr<std::unique_ptr<LocalMesh>> Start(const LocalMeshOptions& options);
  ~LocalMesh();
  LocalMesh(const LocalMesh&) = delete;
  LocalMesh& operator=(const LocalMesh&) = delete;

  const std::string& router() const { return router_; }  // its gRPC address

 private:
  LocalMesh() = default;
  absl::Status AwaitReady(absl::Duration longest, const std::function<bool()>& stop);
  std::string LastWords() const;

  std::unique_ptr<RunFolder> folder_;
  std::string router_;
  std::unique_ptr<Children> children_;
};

}  // namespace deltamesh
