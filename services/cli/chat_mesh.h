// The mesh of a conversation whose user named none.
#pragma once

#include <functional>
#include <memory>
#include <ostream>

#include "absl/status/statusor.h"
#include "services/cli/chat.h"
#include "services/cli/local_mesh.h"

namespace deltamesh {

// With `options->router` empty: takes the router of this machine where one answers, else starts a mesh,
// which lives as long as what is returned, and says so. With a slash in it `options->model` is the checkpoint
// folder for a mesh that is started in any case, else the name that a router serves; the folder is then
// DELTAMESH_MODEL, or the one that comes with deltamesh. Null where nothing was started; CANCELLED where
// `stop` said so meanwhile. INVALID_ARGUMENT: sessions need a mesh that goes on.
absl::StatusOr<std::unique_ptr<LocalMesh>> MeshForChat(ChatOptions* options, std::ostream& out,
                                                       std::function<bool()> stop);

}  // namespace deltamesh
