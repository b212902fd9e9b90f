#include "services/router/cache_hints.h"

#include <string>

#include "runtime/base/status.h"
#include "services/router/session_id.h"

namespace deltamesh {
namespace {

absl::Status CheckText(const char* field, const std::string& text) {
  if (text.size() <= kCacheTextBytesMax) return absl::OkStatus();
  return InvalidArgument("%s: %d bytes; use at most %d", field, text.size(), kCacheTextBytesMax);
}

}  // namespace

absl::StatusOr<mesh::CacheHints> MakeCacheHints(const v1::CacheOptions& options) {
  RETURN_IF_ERROR(CheckText("cache.session", options.session()));
  RETURN_IF_ERROR(CheckText("cache.salt", options.salt()));
  if (options.breakpoints_size() > kCacheBreakpointsMax) {
    return InvalidArgument("cache.breakpoints: %d positions; use at most %d",
                           options.breakpoints_size(), kCacheBreakpointsMax);
  }
  mesh::CacheHints hints;
  hints.set_salt(options.salt());
  if (!options.session().empty()) {
    hints.set_session(SessionNumber(MakeSessionId(options.salt(), options.session())));
  }
  *hints.mutable_breakpoints() = options.breakpoints();
  hints.set_off(options.off());
  return hints;
}

}  // namespace deltamesh
