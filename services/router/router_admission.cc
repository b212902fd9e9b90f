// Who is taken in, and whose turn it is: the front half of RouterCore::Impl.
#include <algorithm>
#include <utility>

#include "runtime/base/status.h"
#include "services/common/retry_hint.h"
#include "services/router/router_core_impl.h"

namespace deltamesh {
namespace {

constexpr int kNewBreakpointsMax = 2;  // of one prompt
// A request that waits asks the index again after this long, if it has changed.
constexpr absl::Duration kLookUpEvery = absl::Milliseconds(100);

}  // namespace

absl::Status RouterCore::Impl::Submit(ClientRequest spec, absl::Time now) {
  // One that did not wait may have begun while this one's session was read.
  if (spec.append && IsRunning(spec.session)) {
    return FailedPrecondition(
        "session: another turn of it began meanwhile; wait for its end or cancel it");
  }
  if (requests.contains(spec.request_id)) {
    return absl::AlreadyExistsError(absl::StrFormat(
        "request_id: \"%s\" is running; use another id or leave it empty", spec.request_id));
  }
  const int64_t tokens = static_cast<int64_t>(spec.prompt.size());
  if (tokens == 0) return InvalidArgument("prompt: no tokens; send at least one");
  if (tokens > options.prompt_tokens_max) {
    return InvalidArgument("prompt: %d tokens, the router takes %d; shorten it", tokens,
                           options.prompt_tokens_max);
  }
  if (static_cast<int64_t>(requests.size()) >= options.live_requests_max) {
    return WithRetryAfter(
        ResourceExhausted("%d requests are in the mesh, the router's bound; retry later",
                          requests.size()),
        RetryAfter(waiting.tokens()));
  }
  RETURN_IF_ERROR(Ready());
  const Contexts contexts = DecodeContexts();
  if (tokens >= contexts.live) {
    return InvalidArgument(
        "prompt: %d tokens leave no room for an answer in a context of %d; shorten it", tokens,
        contexts.live);
  }
  if (tokens >= contexts.open) {
    return Unavailable(
        "prompt: %d tokens leave no room for an answer in a context of %d, and whoever has more is "
        "draining; retry when another is up, or shorten it",
        tokens, contexts.open);
  }
  if (spec.deadline <= now) return DeadlineExceeded("the deadline passed before the request began");
  const int64_t room = contexts.open - tokens;

  RouterRequest r;
  r.fills_context = spec.max_tokens == 0 || spec.max_tokens > room;
  if (r.fills_context) spec.max_tokens = room;
  r.spec = std::move(spec);
  r.deadline = std::min(r.spec.deadline, now + options.request_max);
  r.submitted = r.phase_since = r.waiting_since = now;
  r.turn = next_turn++;
  LookUp(r, now);
  r.cost = CostOf(r);
  BoundBreakpoints(r);
  drain.Pass(now, !waiting.empty());
  RETURN_IF_ERROR(CheckQueue(r));
  Enqueue(r);
  time = now;
  r.decision = decisions.Begin(r.spec.request_id, now);
  Decision& decision = *decisions.At(r.decision);
  decision.trace = r.spec.trace;
  decision.prompt_tokens = r.prompt_tokens();
  decision.cost_tokens = r.cost;
  const RequestId id = r.spec.request_id;
  requests.emplace(id, std::move(r));
  // A placement of this request that ends it at once is the caller's error, not an action.
  PlaceWaiting(now);
  ++counters.submitted;
  return absl::OkStatus();
}

// What the mesh has to compute. Nobody knows how long the answer will be.
int64_t RouterCore::Impl::CostOf(const RouterRequest& r) const {
  int64_t held = 0;
  for (const auto& [link, match] : r.held)
    held = std::max(held, match.reachable().value() * BlockTokens());
  return r.prompt_tokens() - held +
         std::min(r.spec.max_tokens, static_cast<int64_t>(answer_tokens));
}

// Each is a snapshot that is kept for others, and a prompt that nobody repeats could leave many. Those beyond
// what is known already are kept for the second visitor only in part: the shallow ones, which most share.
void RouterCore::Impl::BoundBreakpoints(RouterRequest& r) const {
  uint64_t known = 0;
  for (const auto& [link, match] : r.held) {
    const int64_t blocks = std::max(match.latents.value(), match.reachable().value());
    known = std::max(known, static_cast<uint64_t>(blocks * BlockTokens()));
  }
  auto& at = *r.spec.cache.mutable_breakpoints();
  std::sort(at.begin(), at.end());
  const auto fresh = std::upper_bound(at.begin(), at.end(), known) - at.begin();
  at.Truncate(std::min<int>(at.size(), static_cast<int>(fresh) + kNewBreakpointsMax));
}

absl::Status RouterCore::Impl::CheckQueue(const RouterRequest& r) const {
  const std::string& tenant = r.spec.cache.salt();
  const int64_t requests = waiting.SizeOf(tenant), tokens = waiting.TokensOf(tenant);
  if (requests == 0) return absl::OkStatus();
  const int64_t until_served = waiting.TokensUntilServed(tenant, r.cost);
  const absl::Duration wait = DrainTime(until_served);
  absl::Status full;
  if (requests >= options.waiting_requests_max) {
    full = ResourceExhausted(
        "%d requests wait for a worker, the router's bound for a tenant; retry later", requests);
  } else if (tokens + r.cost > options.waiting_tokens_max) {
    full = ResourceExhausted(
        "requests of %d tokens wait for a worker, one of %d more passes the router's bound for a "
        "tenant, %d; retry later",
        tokens, r.cost, options.waiting_tokens_max);
  } else if (wait > options.waiting_max) {
    full = ResourceExhausted(
        "%d requests wait for a worker; it would take %s, longer than %s; "
        "retry later",
        requests, absl::FormatDuration(absl::Trunc(wait, absl::Seconds(1))),
        absl::FormatDuration(options.waiting_max));
  }
  return full.ok() ? full : WithRetryAfter(full, RetryAfter(until_served));
}

void RouterCore::Impl::Enqueue(const RouterRequest& r) {
  const double rate = PromptRate();
  waiting.Push({.id = r.spec.request_id,
                .tenant = r.spec.cache.salt(),
                .cost = r.cost,
                .since = r.submitted,
                .handicap = absl::Seconds(rate > 0 ? static_cast<double>(r.cost) / rate : 0)});
}

double RouterCore::Impl::PromptRate() const {
  double sum = 0;
  for (const mesh::Role role : {mesh::ROLE_PREFILL, mesh::ROLE_DECODE}) {
    for (const Worker* w : members.Alive(role)) sum += w->load.prompt_tokens_per_second;
  }
  return sum;
}

absl::Duration RouterCore::Impl::DrainTime(int64_t tokens) const {
  double rate = drain.tokens_per_second();
  if (rate <= 0) rate = PromptRate();
  return absl::Seconds(rate > 0 ? static_cast<double>(tokens) / rate : 0);
}

// Not so soon that it is in vain, nor so late that it never comes.
absl::Duration RouterCore::Impl::RetryAfter(int64_t tokens) const {
  return std::max(absl::Seconds(1), std::min(DrainTime(tokens), options.waiting_max));
}

bool RouterCore::Impl::TriedInVain(const RouterRequest& r, const Placing& how,
                                   absl::Time now) const {
  if (r.tried_room != members.room_version()) return false;
  if (r.tried_without_prefill && how.prefill) return false;
  return r.looked_up_version == prefixes.version() || now - r.looked_up < kLookUpEvery;
}

void RouterCore::Impl::PlaceWaiting(absl::Time now) {
  drain.Pass(now, !waiting.empty());
  while (!waiting.empty()) {
    bool placed = false;
    Placing how;
    for (const RequestId& id : waiting.Candidates()) {
      RouterRequest& r = requests.at(id);
      if (!TriedInVain(r, how, now)) {
        const Placed got = TryPlace(r, how, now);
        placed = got == Placed::kYes || got == Placed::kEnded;
        if (placed) break;
        r.tried_room = members.room_version();
        r.tried_without_prefill = !how.prefill;
        r.lacked_prefill = got == Placed::kNoPrefill;
      }
      if (!waiting.Aged(id, now)) continue;
      if (!r.lacked_prefill) return;
      how.prefill = false;  // that room gathers for it; what decode workers have is no use to it
    }
    if (!placed) return;
  }
}

}  // namespace deltamesh
