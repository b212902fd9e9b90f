// What a session is called inside the mesh.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace deltamesh {

// The first 8 bytes of SHA-256("tenant:", salt), so that stores can tell whose it is and give each tenant a
// share; then the first 24 of SHA-256(salt length as a decimal number, ":", salt, name): tenants cannot name
// each other's. 32 bytes; empty is no session.
using SessionId = std::string;
inline constexpr size_t kSessionTenantBytes = 8;

SessionId MakeSessionId(std::string_view salt, std::string_view name);

// Its last eight bytes, little-endian, for the hints of workers' caches; never 0, which is no session.
uint64_t SessionNumber(const SessionId& id);

}  // namespace deltamesh
