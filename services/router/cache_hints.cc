#include "services/router/cache_hints.h"

#include <openssl/evp.h>

#include <array>
#include <string>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

absl::Status CheckText(const char* field, const std::string& text) {
  if (text.size() <= kCacheTextBytesMax) return absl::OkStatus();
  return InvalidArgument("%s: %d bytes; use at most %d", field, text.size(), kCacheTextBytesMax);
}

uint64_t SessionNumber(const std::string& salt, const std::string& session) {
  const std::string text = absl::StrFormat("%d:%s%s", salt.size(), salt, session);
  std::array<unsigned char, EVP_MAX_MD_SIZE> hash{};
  CHECK(EVP_Digest(text.data(), text.size(), hash.data(), nullptr, EVP_sha256(), nullptr) == 1);
  uint64_t number = 0;
  for (size_t i = 8; i-- > 0;) number = number << 8 | hash[i];
  return number == 0 ? 1 : number;  // 0 is no session
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
    hints.set_session(SessionNumber(options.salt(), options.session()));
  }
  *hints.mutable_breakpoints() = options.breakpoints();
  hints.set_off(options.off());
  return hints;
}

}  // namespace deltamesh
