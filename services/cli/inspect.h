// `deltamesh inspect DIR`: what would be loaded from a checkpoint folder, after the same checks.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace deltamesh {

// Prints a summary for people to `out`. Nothing is printed when the checkpoint cannot be served: the
// status says why. Tensor values are not read beyond what the digest samples.
absl::Status RunInspect(const std::string& folder, std::ostream& out);

}  // namespace deltamesh
