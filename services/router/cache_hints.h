// A client's cache options as workers take them.
#pragma once

#include "absl/status/statusor.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "deltamesh/v1/inference.pb.h"

namespace deltamesh {

inline constexpr size_t kCacheTextBytesMax = 256;
inline constexpr int kCacheBreakpointsMax = 16;

// INVALID_ARGUMENT names the field. A session becomes its number (session_id.h).
absl::StatusOr<mesh::CacheHints> MakeCacheHints(const v1::CacheOptions& options);

}  // namespace deltamesh
