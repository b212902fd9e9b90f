#include "services/router/decision_log.h"

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

// A decision of nothing, in the memory of an old one.
void Clear(Decision& d) {
  const auto keep = [](std::string& s) {
    s.clear();
    return std::move(s);
  };
  Decision fresh;
  fresh.request_id = keep(d.request_id);
  fresh.latents_at = keep(d.latents_at);
  fresh.snapshot_at = keep(d.snapshot_at);
  fresh.message = keep(d.message);
  fresh.fetched_from = keep(d.fetched_from);
  fresh.fetch_refusal = keep(d.fetch_refusal);
  fresh.candidates = std::move(d.candidates);
  d = std::move(fresh);
}

}  // namespace

const char* DecisionReasonName(DecisionReason reason) {
  switch (reason) {
    case DecisionReason::kNone:
      return "waits";
    case DecisionReason::kCheapest:
      return "cheapest";
    case DecisionReason::kOnly:
      return "only one with room";
    case DecisionReason::kRefused:
      return "never placed";
  }
  return "waits";
}

void Decision::Add(const DecisionCandidate& candidate) {
  const auto before = [&](const DecisionCandidate& c) {
    return std::pair(!c.room, c.cost.total()) <= std::pair(!candidate.room, candidate.cost.total());
  };
  const auto end = candidates.begin() + static_cast<ptrdiff_t>(candidate_count);
  const auto at = std::partition_point(candidates.begin(), end, before);
  if (candidate_count == kCandidatesMax) {
    ++candidates_left_out;
    if (at == end) return;
    std::rotate(at, end - 1, end);
  } else {
    ++candidate_count;
    std::rotate(at, end, end + 1);
  }
  *at = candidate;
}

DecisionLog::Ticket DecisionLog::Begin(std::string_view request_id, absl::Time now) {
  Decision& d = ring_[begun_ % ring_.size()];
  Clear(d);
  d.request_id.assign(request_id);
  d.submitted = now;
  return ++begun_;
}

Decision* DecisionLog::At(Ticket ticket) {
  if (ticket == 0 || begun_ - ticket >= ring_.size()) return nullptr;
  return &ring_[(ticket - 1) % ring_.size()];
}

template <typename Wanted>
std::vector<const Decision*> DecisionLog::Select(size_t most, Wanted wanted) const {
  std::vector<const Decision*> out;
  const uint64_t held = std::min<uint64_t>(begun_, ring_.size());
  for (uint64_t back = 0; back < held && out.size() < most; ++back) {
    const Decision& d = ring_[(begun_ - 1 - back) % ring_.size()];
    if (wanted(d)) out.push_back(&d);
  }
  return out;
}

std::vector<const Decision*> DecisionLog::Find(std::string_view request_id, size_t most) const {
  return Select(most, [&](const Decision& d) {
    const std::string_view id = d.request_id;
    return id == request_id || (id.starts_with(request_id) && id.size() > request_id.size() &&
                                id[request_id.size()] == '/');
  });
}

std::vector<const Decision*> DecisionLog::Last(size_t most) const {
  return Select(most, [](const Decision&) { return true; });
}

}  // namespace deltamesh
