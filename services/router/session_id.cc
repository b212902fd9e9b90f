#include "services/router/session_id.h"

#include <openssl/evp.h>

#include <array>

#include "runtime/base/status.h"

namespace deltamesh {

SessionId MakeSessionId(std::string_view salt, std::string_view name) {
  const std::string text = absl::StrFormat("%d:%s%s", salt.size(), salt, name);
  std::array<unsigned char, EVP_MAX_MD_SIZE> hash{};
  unsigned int bytes = 0;
  CHECK(EVP_Digest(text.data(), text.size(), hash.data(), &bytes, EVP_sha256(), nullptr) == 1);
  return SessionId(hash.begin(), hash.begin() + bytes);
}

uint64_t SessionNumber(const SessionId& id) {
  CHECK(id.size() >= 8, "a session id of %d bytes", id.size());
  uint64_t number = 0;
  for (size_t i = 8; i-- > 0;) number = number << 8 | static_cast<unsigned char>(id[i]);
  return number == 0 ? 1 : number;
}

}  // namespace deltamesh
