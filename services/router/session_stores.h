// What routers know of the stores of workers, and of the records in them.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "deltamesh/mesh/session.pb.h"
#include "services/router/membership.h"
#include "services/router/session_types.h"

namespace deltamesh {

inline constexpr uint32_t kSessionRecordVersion = 1;

// Prefill and decode workers that have one: decode workers first, those with most room in front.
std::vector<Worker*> StoresOf(Membership* members);

// The names of all workers with a store that ever were connected, at most kMax of them. Not thread-safe: part
// of the router's core.
class KnownStores {
 public:
  static constexpr size_t kMax = 1024;

  void Joined(const mesh::Register& worker);
  // One that is not connected now.
  std::optional<std::string> Missing(Membership* members) const;

 private:
  std::set<std::string> names_;
};

// Whether a record that came for `session` is one of it, and of the model that is served.
absl::Status CheckSessionRecord(const mesh::SessionRecord& record, const SessionId& session,
                                const std::optional<mesh::ModelIdentity>& identity, int64_t vocab);

// A worker's answer as a status; why it was no record; and whether it could say what it has: a record, none,
// or one that is of no use.
absl::Status SessionStatusOf(const mesh::SessionReply& reply, const std::string& worker);
SessionRefusal SessionRefusalOf(const absl::Status& status);
bool IsSaid(const absl::Status& status);

}  // namespace deltamesh
