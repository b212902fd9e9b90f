// The version of what processes say to each other.
#pragma once

#include <cstdint>

namespace deltamesh {

// Of the messages in proto/deltamesh/mesh; both ends of a link must have the same.
inline constexpr uint32_t kMeshProtocol = 2;

}  // namespace deltamesh
