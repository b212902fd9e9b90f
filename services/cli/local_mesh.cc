#include "services/cli/local_mesh.h"

#include <unistd.h>

#include <fstream>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "runtime/base/status.h"
#include "runtime/engine/engine.h"

namespace deltamesh {
namespace {

constexpr int64_t kUsualSequences = EngineOptions{}.running_max;
constexpr std::string_view kGrpc = "grpc  ";  // before the router's address

}  // namespace

absl::StatusOr<std::unique_ptr<LocalMesh>> LocalMesh::Start(const LocalMeshOptions& o) {
  std::unique_ptr<LocalMesh> mesh(new LocalMesh);
  ASSIGN_OR_RETURN(mesh->folder_, RunFolder::Create());
  const std::string& folder = mesh->folder_->path();
  mesh->children_ = std::make_unique<Children>(folder);
  std::vector<std::string> args = {"serve",
                                   "--model=" + o.model,
                                   "--model-name=" + o.name,
                                   "--grpc-port=0",
                                   "--http-port=0",
                                   "--threads=" + std::to_string(o.threads),
                                   "--experts=" + std::to_string(o.experts),
                                   "--weights=" + o.weights,
                                   "--activations=" + o.activations,
                                   "--packed-dir=" + o.packed_dir,
                                   "--run-dir=" + folder + "/run",
                                   "--parent=" + std::to_string(getpid())};
  if (o.sequences > kUsualSequences) {  // else the mesh is as anyone would start it
    for (const char* flag : {"--running=", "--slabs=", "--requests="}) {
      args.push_back("--worker-flag=" + (flag + std::to_string(o.sequences)));
    }
    if (o.sequences >
        EngineOptions{}.step_tokens_max) {  // each that decodes takes a token of a step
      args.push_back("--worker-flag=--step-tokens=" + std::to_string(o.sequences));
    }
  }
  args.insert(args.end(), o.flags.begin(), o.flags.end());
  RETURN_IF_ERROR(mesh->children_->Start("serve", std::move(args)));
  RETURN_IF_ERROR(mesh->AwaitReady(o.ready_max, o.stop));
  return mesh;
}

LocalMesh::~LocalMesh() {
  if (children_) children_->StopAll(absl::Seconds(10));
}

absl::Status LocalMesh::AwaitReady(absl::Duration longest, const std::function<bool()>& stop) {
  const absl::Time until = absl::Now() + longest;
  for (; absl::Now() < until; absl::SleepFor(absl::Milliseconds(50))) {
    if (stop && stop()) return Cancelled("stopped while the mesh was starting");
    if (const std::optional<Children::Exit> exit = children_->Reap()) {
      return Unavailable("the local mesh ended: %s. Its last words:\n%s", exit->how, LastWords());
    }
    // Its word that all processes, not only the router, are up.
    std::ifstream log(children_->log_path("serve"));
    for (std::string line; std::getline(log, line);) {
      const size_t at = line.find(kGrpc);
      if (!line.starts_with("ready ") || at == std::string::npos) continue;
      router_ = line.substr(at + kGrpc.size());
      return absl::OkStatus();
    }
  }
  return DeadlineExceeded("the local mesh was not ready within %s. Its last words:\n%s",
                          absl::FormatDuration(longest), LastWords());
}

std::string LocalMesh::LastWords() const {
  std::string out;
  for (const std::string& line : children_->Tail("serve", 12)) out += "  | " + line + "\n";
  return out;
}

}  // namespace deltamesh
