#include "services/cli/chat_mesh.h"

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "runtime/base/status.h"
#include "services/cli/first_answer.h"
#include "services/cli/shipped_model.h"

namespace deltamesh {
namespace {

constexpr char kRouter[] = "127.0.0.1:8081";  // where `deltamesh serve` puts it

}  // namespace

absl::StatusOr<std::unique_ptr<LocalMesh>> MeshForChat(ChatOptions* options, std::ostream& out,
                                                       std::function<bool()> stop) {
  if (!options->router.empty()) return nullptr;
  options->router = kRouter;
  const bool folder = options->model.find('/') != std::string::npos;
  if (!folder && IsServing(kRouter)) return nullptr;
  if (!options->session.empty()) {
    return InvalidArgument(
        "--session: kept by a mesh that goes on; start one with `deltamesh serve`, or pass "
        "--router");
  }
  LocalMeshOptions mesh;
  mesh.experts = 0;
  mesh.threads = 1;
  mesh.stop = std::move(stop);
  if (folder) {
    mesh.model = std::exchange(options->model, "");
  } else if (const char* named = std::getenv("DELTAMESH_MODEL"); named != nullptr && *named != 0) {
    mesh.model = named;
  } else {
    ASSIGN_OR_RETURN(mesh.model, ShippedModel());
  }
  mesh.name = std::filesystem::path(mesh.model + "/").lexically_normal().parent_path().filename();
  if (mesh.name.empty()) mesh.name = "model";
  out << "starting a mesh with " << mesh.model << ", for as long as this conversation\n"
      << std::flush;
  ASSIGN_OR_RETURN(auto own, LocalMesh::Start(mesh));
  options->router = own->router();
  return own;
}

}  // namespace deltamesh
