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
  fresh.trace.trace_id = keep(d.trace.trace_id);
  fresh.trace.parent_id = keep(d.trace.parent_id);
  fresh.trace.span_id = keep(d.trace.span_id);
  fresh.latents_at = keep(d.latents_at);
  fresh.snapshot_at = keep(d.snapshot_at);
  fresh.message = keep(d.message);
  fresh.fetched_from = keep(d.fetched_from);
  fresh.fetch_refusal = keep(d.fetch_refusal);
  fresh.candidates = std::move(d.candidates);
  d.fetches_open.clear();
  fresh.fetches_open = std::move(d.fetches_open);
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
    case DecisionReason::kTurnedAway:
      return "refused before the queue";
  }
  return "waits";
}

const char* ReadFromName(ReadFrom from) {
  switch (from) {
    case ReadFrom::kNothing:
      return "";
    case ReadFrom::kDisk:
      return "disk";
    case ReadFrom::kObjects:
      return "object store";
  }
  return "";
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

Decision& DecisionLog::Ring::Next() {
  Decision& d = slots[begun++ % slots.size()];
  Clear(d);
  return d;
}

const Decision* DecisionLog::Ring::Back(uint64_t back) const {
  if (back >= std::min<uint64_t>(begun, slots.size())) return nullptr;
  return &slots[(begun - 1 - back) % slots.size()];
}

DecisionLog::Ticket DecisionLog::Begin(std::string_view request_id, absl::Time now) {
  Decision& d = decided_.Next();
  d.request_id.assign(request_id);
  d.submitted = now;
  d.order = decided_.begun + refused_.begun;
  return decided_.begun;
}

Decision* DecisionLog::At(Ticket ticket) {
  if (ticket == 0 || decided_.begun - ticket >= decided_.slots.size()) return nullptr;
  return &decided_.slots[(ticket - 1) % decided_.slots.size()];
}

Decision* DecisionLog::Awaiting(std::string_view request_id, const Decision::OpenFetch& fetch) {
  for (Decision& d : decided_.slots) {
    const auto& open = d.fetches_open;
    if (std::find(open.begin(), open.end(), fetch) == open.end()) continue;
    if (std::string_view(d.request_id) == request_id) return &d;
  }
  return nullptr;
}

const Decision& DecisionLog::Refuse(const RefusedRequest& refusal, absl::Time now) {
  Decision& d = refused_.Next();
  d.request_id.assign(refusal.request_id);
  d.trace = refusal.trace;
  d.submitted = now;
  d.order = decided_.begun + refused_.begun;
  d.prompt_tokens = refusal.prompt_tokens;
  d.reason = DecisionReason::kTurnedAway;
  d.seconds = 0;
  d.code = refusal.status.code();
  const std::string_view why(refusal.status.message().data(), refusal.status.message().size());
  d.message.assign(why.substr(0, Decision::kMessageBytesMax));
  return d;
}

template <typename Wanted>
std::vector<const Decision*> DecisionLog::Select(size_t most, Wanted wanted) const {
  std::vector<const Decision*> out;
  uint64_t decided = 0, refused = 0;
  while (out.size() < most) {
    const Decision* a = decided_.Back(decided);
    const Decision* b = refused_.Back(refused);
    if (a == nullptr && b == nullptr) break;
    const bool first = b == nullptr || (a != nullptr && a->order > b->order);
    ++(first ? decided : refused);
    const Decision* d = first ? a : b;
    if (wanted(*d)) out.push_back(d);
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

std::vector<const Decision*> DecisionLog::FindTrace(std::string_view trace_id, size_t most) const {
  return Select(most, [&](const Decision& d) { return d.trace.trace_id == trace_id; });
}

std::vector<const Decision*> DecisionLog::Last(size_t most) const {
  return Select(most, [](const Decision&) { return true; });
}

}  // namespace deltamesh
