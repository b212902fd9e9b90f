#include "services/cli/chat_mesh.h"

#include <filesystem>

#include "runtime/base/status.h"
#include "services/cli/first_answer.h"
#include "services/cli/shipped_model.h"

namespace deltamesh {
namespace {

constexpr char kRouter[] = "127.0.0.1:8081";  // where `deltamesh serve` puts it

}  // namespace

absl::StatusOr<std::unique_ptr<LocalMesh>> MeshForChat(ChatOptions* options, std::ostream& out) {
  if (!options->router.empty()) return nullptr;
  options->router = kRouter;
  const bool folder = std::filesystem::is_directory(options->model);
  if (!folder && IsServing(kRouter)) return nullptr;
  LocalMeshOptions mesh;
  mesh.experts = 0;
  mesh.threads = 1;
  if (folder) {
    mesh.model = std::exchange(options->model, "");
  } else {
    ASSIGN_OR_RETURN(mesh.model, ShippedModel());
  }
  mesh.name = std::filesystem::path(mesh.model).lexically_normal().filename().string();
  if (mesh.name.empty()) mesh.name = "model";
  out << "starting a mesh with " << mesh.model << ", for as long as this conversation\n"
      << std::flush;
  ASSIGN_OR_RETURN(auto own, LocalMesh::Start(mesh));
  options->router = own->router();
  return own;
}

}  // namespace deltamesh
