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
// which lives as long as what is returned, and says so. `options->model` may be the checkpoint folder for
// it; without, it is DELTAMESH_MODEL, or the one that comes with deltamesh. Null where nothing was started;
// CANCELLED where `stop` said so meanwhile. INVALID_ARGUMENT: sessions need a mesh that goes on.
absl::StatusOr<std::unique_ptr<LocalMesh>> MeshForChat(ChatOptions* options, std::ostream& out,
                                                       std::function<bool()> stop);

}  // namespace deltamesh
