#include "services/router/session_id.h"

#include <openssl/evp.h>

#include <array>

#include "runtime/base/status.h"

namespace deltamesh {

namespace {

std::string Sha256(const std::string& text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> hash{};
  unsigned int bytes = 0;
  CHECK(EVP_Digest(text.data(), text.size(), hash.data(), &bytes, EVP_sha256(), nullptr) == 1);
  return std::string(hash.begin(), hash.begin() + bytes);
}

}  // namespace

SessionId MakeSessionId(std::string_view salt, std::string_view name) {
  const std::string tenant = Sha256(absl::StrFormat("tenant:%s", salt));
  const std::string own = Sha256(absl::StrFormat("%d:%s%s", salt.size(), salt, name));
  return tenant.substr(0, kSessionTenantBytes) + own.substr(0, own.size() - kSessionTenantBytes);
}

uint64_t SessionNumber(const SessionId& id) {
  CHECK(id.size() >= 8, "a session id of %d bytes", id.size());
  uint64_t number = 0;
  for (size_t i = 0; i < 8; ++i) {
    number = number << 8 | static_cast<unsigned char>(id[id.size() - 1 - i]);
  }
  return number == 0 ? 1 : number;
}

}  // namespace deltamesh
