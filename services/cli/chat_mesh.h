// The mesh of a conversation whose user named none.
#pragma once

#include <memory>
#include <ostream>

#include "absl/status/statusor.h"
#include "services/cli/chat.h"
#include "services/cli/local_mesh.h"

namespace deltamesh {

// With `options->router` empty: takes the router of this machine where one answers, else starts a mesh,
// which lives as long as what is returned, and says so. `options->model` may be the checkpoint folder for
// it; without, it is the one that comes with deltamesh. Null where nothing was started.
absl::StatusOr<std::unique_ptr<LocalMesh>> MeshForChat(ChatOptions* options, std::ostream& out);

}  // namespace deltamesh
