// The model that comes with the program, for those who name none.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace deltamesh {

// Its checkpoint folder, looked for from where the program lies. NOT_FOUND names the places.
absl::StatusOr<std::string> ShippedModel();

}  // namespace deltamesh
