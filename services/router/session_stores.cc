#include "services/router/session_stores.h"

#include <algorithm>
#include <tuple>

#include "runtime/base/status.h"
#include "services/common/retry_hint.h"

namespace deltamesh {

std::vector<Worker*> StoresOf(Membership* members) {
  std::vector<Worker*> out;
  for (const mesh::Role role : {mesh::ROLE_DECODE, mesh::ROLE_PREFILL}) {
    for (Worker* worker : members->Alive(role)) {
      if (worker->registration.session_store()) out.push_back(worker);
    }
  }
  std::stable_sort(out.begin(), out.end(), [](const Worker* a, const Worker* b) {
    const auto rank = [](const Worker* w) {
      return std::tuple(w->registration.role() != mesh::ROLE_DECODE, w->load.draining,
                        -w->load.slabs_free);
    };
    return rank(a) < rank(b);
  });
  return out;
}

void KnownStores::Joined(const mesh::Register& worker) {
  away_.erase(worker.name());
  if (worker.session_store()) {
    here_.insert(worker.name());
  } else {
    here_.erase(worker.name());
  }
}

void KnownStores::Left(const std::string& worker, absl::Time now) {
  if (here_.erase(worker) > 0) away_[worker] = now;
}

KnownStores::Leaving::const_iterator KnownStores::First() const {
  return std::min_element(away_.begin(), away_.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; });
}

std::vector<std::string> KnownStores::Forget(absl::Time now) {
  std::vector<std::string> forgotten;
  for (auto first = First(); first != away_.end(); first = First()) {
    if (now - first->second < forget_after_ && away_.size() <= kAwayMax) break;
    forgotten.push_back(first->first);
    away_.erase(first);
  }
  return forgotten;
}

std::optional<KnownStores::Away> KnownStores::Missing(absl::Time now) const {
  const auto first = First();
  if (first == away_.end()) return std::nullopt;
  return Away{first->first, std::max(absl::ZeroDuration(), first->second + forget_after_ - now)};
}

absl::Status CheckSessionRecord(const mesh::SessionRecord& record, const SessionId& session,
                                const std::optional<mesh::ModelIdentity>& identity, int64_t vocab) {
  if (record.version() != kSessionRecordVersion) {
    return FailedPrecondition("its record has version %d, this router reads %d", record.version(),
                              kSessionRecordVersion);
  }
  if (!identity || record.digest() != identity->digest() ||
      record.state_layout() != identity->state_layout() ||
      record.text_digest() != identity->text_digest()) {
    return FailedPrecondition("its record is of model %s, layout %d; here is %s, layout %d",
                              record.digest(), record.state_layout(),
                              identity ? identity->digest() : "none",
                              identity ? identity->state_layout() : 0);
  }
  if (record.session() != session) {
    return absl::DataLossError("its record carries the name of another session");
  }
  const bool tokens = record.tokens_size() > 0 &&
                      std::all_of(record.tokens().begin(), record.tokens().end(),
                                  [&](int32_t t) { return t >= 0 && (vocab == 0 || t < vocab); });
  if (!tokens || record.position() > static_cast<uint64_t>(record.tokens_size())) {
    return absl::DataLossError("its record holds no tokens, or impossible ones");
  }
  return absl::OkStatus();
}

bool IsSaid(const absl::Status& status) {
  return status.ok() || absl::IsNotFound(status) || absl::IsDataLoss(status) ||
         absl::IsFailedPrecondition(status);
}

SessionRefusal SessionRefusalOf(const absl::Status& status) {
  if (absl::IsDataLoss(status)) return SessionRefusal::kDamaged;
  if (absl::IsFailedPrecondition(status)) return SessionRefusal::kForeign;
  return SessionRefusal::kStore;
}

absl::Status SessionStatusOf(const mesh::SessionReply& reply, const std::string& worker) {
  const bool known =
      reply.code() > 0 && reply.code() <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  const absl::Status status(
      known ? static_cast<absl::StatusCode>(reply.code()) : absl::StatusCode::kInternal,
      absl::StrFormat("worker \"%s\": %s", worker, reply.message()));
  if (reply.retry_after_ms() == 0) return status;
  return WithRetryAfter(status, absl::Milliseconds(reply.retry_after_ms()));
}

}  // namespace deltamesh
