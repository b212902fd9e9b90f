// Which CPUs threads may run on.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace deltamesh {

// "0-3,8" as ascending numbers, each once; empty for "". INVALID_ARGUMENT for anything else.
absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text);

// Binds the calling thread, and every thread that it starts from then on. INVALID_ARGUMENT when this process
// may not run on all of them.
absl::Status BindThisThread(std::span<const int> cpus);

}  // namespace deltamesh
