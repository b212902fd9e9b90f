// How much memory this process may still take before the system ends it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace deltamesh {

// Bytes: the smaller of what the machine has available and what the control group (version 2) leaves;
// page cache counts as free in both. Files are read below `root`, which tests give. NOT_FOUND when the
// system does not tell.
absl::StatusOr<int64_t> AvailableMemory(const std::string& root = "");

}  // namespace deltamesh
