// What routers know of the stores of workers, and of the records in them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/session.pb.h"
#include "services/router/membership.h"
#include "services/router/session_types.h"

namespace deltamesh {

inline constexpr uint32_t kSessionRecordVersion = 1;

// Prefill and decode workers that have one: decode workers first, those with most room in front.
std::vector<Worker*> StoresOf(Membership* members);

// The workers with a store that are connected, and those that were and may come back. None says that it
// leaves for good: one that drains is mostly restarted, with the same disk. So only time tells: a store that
// is away for `forget_after` is forgotten, and beyond kAwayMax the one that left first. A worker that comes
// back under its name without a store has none any more.
//
// Not thread-safe: part of the router's core.
class KnownStores {
 public:
  static constexpr size_t kAwayMax = 1024;

  explicit KnownStores(absl::Duration forget_after) : forget_after_(forget_after) {}

  void Joined(const mesh::Register& worker);
  void Left(const std::string& worker, absl::Time now);
  // The names of those that are forgotten from now on.
  std::vector<std::string> Forget(absl::Time now);

  struct Away {
    std::string worker;
    absl::Duration left;  // until it is forgotten
  };
  // The one that left first.
  std::optional<Away> Missing(absl::Time now) const;
  int64_t here() const { return static_cast<int64_t>(here_.size()); }
  int64_t away() const { return static_cast<int64_t>(away_.size()); }

 private:
  using Leaving = std::map<std::string, absl::Time>;
  Leaving::const_iterator First() const;

  const absl::Duration forget_after_;
  std::set<std::string> here_;
  Leaving away_;
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
