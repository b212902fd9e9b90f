#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/prefix/prefix_hash.h"
#include "services/router/policy.h"
#include "services/router/router_core_impl.h"

namespace deltamesh {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t RouterCore::Impl::BlockTokens() const {
  const auto identity = members.identity();
  CHECK(identity && identity->block_tokens() > 0,
        "a worker is registered, so the identity is known");
  return identity->block_tokens();
}

int64_t RouterCore::Impl::ContextTokens() const {
  int64_t best = 0;
  for (const Worker* w : members.Alive(mesh::ROLE_DECODE)) {
    const int64_t pool =
        static_cast<int64_t>(w->registration.capacity().latent_blocks()) * BlockTokens();
    best = std::max(best, std::min(w->load.context_tokens, pool));
  }
  return best;
}

absl::Status RouterCore::Impl::Ready() const {
  const std::vector<Worker*> decode = members.Alive(mesh::ROLE_DECODE);
  if (decode.empty()) return Unavailable("no decode worker is connected; start one or wait for it");
  if (std::all_of(decode.begin(), decode.end(), [](const Worker* w) { return w->load.draining; })) {
    return Unavailable("all %d decode workers are draining; retry when others are up",
                       decode.size());
  }
  return members.ExpertsComplete();
}

absl::Status RouterCore::Impl::Submit(ClientRequest spec, absl::Time now) {
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
    return ResourceExhausted("%d requests are in the mesh, the router's bound; retry later",
                             requests.size());
  }
  RETURN_IF_ERROR(Ready());
  const int64_t context = ContextTokens();
  if (tokens >= context) {
    return InvalidArgument(
        "prompt: %d tokens leave no room for an answer in a context of %d; shorten it", tokens,
        context);
  }
  if (spec.deadline <= now) return DeadlineExceeded("the deadline passed before the request began");
  const int64_t room = context - tokens;
  spec.max_tokens = spec.max_tokens == 0 ? room : std::min(spec.max_tokens, room);

  const RequestId id = spec.request_id;
  RouterRequest& r = requests[id];
  r.spec = std::move(spec);
  r.deadline = std::min(r.spec.deadline, now + options.request_max);
  r.phase_since = r.waiting_since = now;
  waiting.push_back(id);
  // A placement of this request that ends it at once is the caller's error, not an action.
  PlaceWaiting(now);
  const RouterRequest* placed = Find(id);
  if (placed != nullptr && placed->phase == RequestPhase::kWaiting &&
      static_cast<int64_t>(waiting.size()) > options.waiting_requests_max) {
    Erase(requests.at(id));
    return ResourceExhausted(
        "%d requests wait for a decode worker, the router's bound; retry later",
        options.waiting_requests_max);
  }
  ++counters.submitted;
  return absl::OkStatus();
}

void RouterCore::Impl::PlaceWaiting(absl::Time now) {
  while (!waiting.empty()) {
    RouterRequest& r = requests.at(waiting.front());
    // A request that does not fit yet holds back those behind it: large prompts must not starve.
    if (TryPlace(r, now) == Placed::kNoRoom) return;
  }
}

RouterCore::Impl::Placed RouterCore::Impl::TryPlace(RouterRequest& r, absl::Time now) {
  if (const absl::Status ready = Ready(); !ready.ok()) {
    Fail(r, ready);
    return Placed::kEnded;
  }
  const int64_t reach = r.prompt_tokens() + r.spec.max_tokens;
  if (reach > ContextTokens()) {
    Fail(r, Unavailable("no live decode worker can hold %d tokens; the one that could has left",
                        reach));
    return Placed::kEnded;
  }
  const int64_t block = BlockTokens();
  const int64_t position = (r.prompt_tokens() - 1) / block * block;
  NamePrefixes(r);
  const Held held = FindHeld(r);
  bool prefill_capable = false;
  std::optional<double> prefill_seconds;
  if (position > 0) {
    for (const Worker* w : members.Alive(mesh::ROLE_PREFILL)) {
      const mesh::Capacity& c = w->registration.capacity();
      prefill_capable |= !w->load.draining && w->load.context_tokens >= position &&
                         static_cast<int64_t>(c.latent_blocks()) * block >= position;
    }
    if (prefill_capable) prefill_seconds = ChoosePrefill(r, position, held);
  }
  std::optional<DecodeChoice> chosen;
  if (prefill_seconds) chosen = ChooseDecode(r, position, /*handoff=*/true, /*anyone=*/true, held);
  // A decode worker that has the session may compute what is new sooner than it could be brought there.
  const std::optional<DecodeChoice> alone =
      ChooseDecode(r, position, /*handoff=*/false, /*anyone=*/!prefill_capable, held);
  const bool with_prefill =
      chosen && (!alone || *prefill_seconds + chosen->seconds < alone->seconds);
  if (!with_prefill) {
    ReleasePrefill(r);
    // Rather wait for a prefill worker than load one that decodes with more than a step of prompt.
    if (!alone || (prefill_capable && !chosen && !FitsAStep(*alone))) return Placed::kNoRoom;
    chosen = alone;
  }
  waiting.pop_front();
  r.decode = chosen->worker->link;
  r.decode_name = chosen->worker->load.name;
  r.decode_blocks = chosen->shape.blocks;
  r.decode_tokens = chosen->shape.compute_tokens;
  members.Charge(r.decode, 1, r.decode_blocks, r.decode_tokens);
  const bool append = chosen->shape.compute_tokens < r.prompt_tokens();
  ++(with_prefill ? counters.placed_prefill
     : append     ? counters.placed_append
                  : counters.placed_alone);
  r.handoff_tokens = with_prefill ? position : 0;
  r.phase = with_prefill ? RequestPhase::kLanding : RequestPhase::kDecoding;
  r.phase_since = now;
  r.cached_tokens = 0;
  r.attempt = std::exchange(next_attempt, next_attempt + kAttemptsPerPlacement);
  r.refused_attempt = 0;
  SendStartDecode(r);
  LogInfo(
      "request.placed",
      {{"request", r.spec.request_id},
       {"decode", r.decode_name},
       {"prefill", r.prefill != 0 ? r.prefill_name : "none"},
       {"attempt", r.attempt},
       {"prompt_tokens", r.prompt_tokens()},
       {"to_compute", (with_prefill ? r.prefill_tokens : 0) + r.decode_tokens},
       {"estimated_seconds", with_prefill ? *prefill_seconds + chosen->seconds : chosen->seconds}});
  return Placed::kYes;
}

bool RouterCore::Impl::FitsAStep(const DecodeChoice& choice) const {
  const mesh::Capacity& c = choice.worker->registration.capacity();
  return choice.shape.compute_tokens <= static_cast<int64_t>(c.step_tokens());
}

void RouterCore::Impl::NamePrefixes(RouterRequest& r) const {
  if (prefixes.empty() || r.spec.cache.off() || !r.keys.empty()) return;
  const auto identity = members.identity();
  if (!identity) return;
  PrefixChain chain(PrefixModel(identity->digest(), identity->state_layout()), r.spec.cache.salt());
  chain.Append(std::span(r.spec.prompt).first(r.spec.prompt.size() - 1));
  for (const PrefixKey& key : chain.keys()) r.keys.push_back(key.index());
}

RouterCore::Impl::Held RouterCore::Impl::FindHeld(const RouterRequest& r) const {
  return r.keys.empty() ? Held() : prefixes.Find(r.keys);
}

// With rates where they are not known yet: those of the others.
std::vector<WorkerLoad> RouterCore::Impl::LoadsOf(const std::vector<Worker*>& workers) {
  double sum = 0;
  int64_t known = 0;
  for (const mesh::Role role : {mesh::ROLE_PREFILL, mesh::ROLE_DECODE}) {
    for (const Worker* w : members.Alive(role)) {
      sum += w->load.prompt_tokens_per_second;
      known += w->load.prompt_tokens_per_second > 0;
    }
  }
  std::vector<WorkerLoad> loads;
  for (const Worker* w : workers) {
    loads.push_back(w->load);
    double& rate = loads.back().prompt_tokens_per_second;
    if (rate == 0 && known > 0) rate = sum / static_cast<double>(known);
  }
  return loads;
}

std::optional<double> RouterCore::Impl::ChoosePrefill(RouterRequest& r, int64_t position,
                                                      const Held& held) {
  const int64_t block = BlockTokens();
  const RequestShape shape = {.request_id = r.spec.request_id,
                              .compute_tokens = position,
                              .blocks = position / block,
                              .context_tokens = position};
  // The worker that failed last is taken only when no other has room.
  for (const bool avoid : {true, false}) {
    std::vector<Worker*> candidates;
    std::vector<Holding> holdings;
    for (Worker* w : members.Alive(mesh::ROLE_PREFILL)) {
      if (avoid && w->load.name == r.avoid_prefill) continue;
      candidates.push_back(w);
      const auto found = held.find(w->link);
      const int64_t cached = found == held.end() ? 0 : found->second.snapshot * block;
      holdings.push_back({.cached_tokens = std::min(cached, position)});
    }
    const std::optional<WorkerChoice> chosen = ChooseWorker(LoadsOf(candidates), shape, holdings);
    if (!chosen) continue;
    r.prefill = candidates[chosen->index]->link;
    r.prefill_name = candidates[chosen->index]->load.name;
    r.prefill_blocks = shape.blocks;
    r.prefill_tokens = position - holdings[chosen->index].cached_tokens;
    members.Charge(r.prefill, 1, r.prefill_blocks, r.prefill_tokens);
    return chosen->seconds;
  }
  return std::nullopt;
}

std::optional<RouterCore::Impl::DecodeChoice> RouterCore::Impl::ChooseDecode(
    const RouterRequest& r, int64_t position, bool handoff, bool anyone, const Held& held) {
  const int64_t block = BlockTokens(), reach = r.prompt_tokens() + r.spec.max_tokens;
  DecodeChoice out;
  out.shape = {.request_id = r.spec.request_id,
               .compute_tokens = handoff ? r.prompt_tokens() - position : r.prompt_tokens(),
               .blocks = CeilDiv(reach, block),
               .context_tokens = reach};
  std::vector<Worker*> candidates;
  std::vector<Holding> holdings;
  for (Worker* w : members.Alive(mesh::ROLE_DECODE)) {
    const auto found = held.find(w->link);
    const IndexMatch match = found == held.end() ? IndexMatch() : found->second;
    if (!anyone && match.snapshot == 0) continue;
    Holding holding;
    if (handoff) {
      const mesh::Capacity& c = w->registration.capacity();
      const double bytes = static_cast<double>(c.slab_bytes()) +
                           static_cast<double>(position / block - match.latents) *
                               static_cast<double>(c.block_bytes());
      if (handoff_bytes_per_second > 0) holding.transfer_seconds = bytes / handoff_bytes_per_second;
    } else {
      holding.cached_tokens = match.snapshot * block;
    }
    candidates.push_back(w);
    holdings.push_back(holding);
  }
  const std::optional<WorkerChoice> chosen = ChooseWorker(LoadsOf(candidates), out.shape, holdings);
  if (!chosen) return std::nullopt;
  out.worker = candidates[chosen->index];
  out.shape.compute_tokens -= holdings[chosen->index].cached_tokens;
  out.seconds = chosen->seconds;
  return out;
}

void RouterCore::Impl::SendStartDecode(const RouterRequest& r) {
  mesh::RouterMessage message;
  mesh::StartDecode* start = message.mutable_start_decode();
  start->set_request_id(r.spec.request_id);
  start->mutable_prompt()->Assign(r.spec.prompt.begin(), r.spec.prompt.end());
  *start->mutable_sampling() = r.spec.sampling;
  start->set_max_tokens(static_cast<uint32_t>(r.spec.max_tokens));
  start->mutable_stop_token_ids()->Assign(r.spec.stop_token_ids.begin(),
                                          r.spec.stop_token_ids.end());
  start->set_handoff_tokens(static_cast<uint64_t>(r.handoff_tokens));
  start->set_attempt(r.attempt);
  start->set_deadline_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(r.deadline)));
  *start->mutable_cache() = r.spec.cache;
  actions.push_back(SendToWorker{r.decode, std::move(message)});
}

void RouterCore::Impl::SendStartPrefill(RouterRequest& r, const mesh::Landing& landing,
                                        absl::Time now) {
  mesh::RouterMessage message;
  mesh::StartPrefill* start = message.mutable_start_prefill();
  start->set_request_id(r.spec.request_id);
  start->mutable_tokens()->Assign(r.spec.prompt.begin(), r.spec.prompt.begin() + r.handoff_tokens);
  *start->mutable_landing() = landing;
  start->set_attempt(r.attempt);
  start->set_deadline_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(r.deadline)));
  *start->mutable_cache() = r.spec.cache;
  actions.push_back(SendToWorker{r.prefill, std::move(message)});
  r.sender = r.prefill;
  r.phase = RequestPhase::kHandoff;
  r.phase_since = now;
}

void RouterCore::Impl::SendCancel(LinkId link, const RequestId& id) {
  if (members.Find(link) == nullptr) return;
  mesh::RouterMessage message;
  message.mutable_cancel()->set_request_id(id);
  actions.push_back(SendToWorker{link, std::move(message)});
}

void RouterCore::Impl::Requeue(RouterRequest& r, absl::Time now) {
  SendCancel(r.decode, r.spec.request_id);
  SendCancel(r.prefill, r.spec.request_id);
  ReleaseDecode(r);
  ReleasePrefill(r);
  r.phase = RequestPhase::kWaiting;
  r.phase_since = r.waiting_since = now;
  r.prefill_gave_up.reset();
  waiting.push_front(r.spec.request_id);
}

void RouterCore::Impl::FailWaiting(RouterRequest& r) {
  Fail(r, ResourceExhausted("waited %s for a worker with room; retry later",
                            absl::FormatDuration(options.waiting_max)));
}

void RouterCore::Impl::WaitForRoom(RouterRequest& r, LinkId full, absl::Time now) {
  ++counters.placement_refusals;
  const absl::Time since = r.waiting_since;
  // Here too: a tick may find the request with a worker each time, and the wait would not end.
  if (now - since > options.waiting_max) {
    FailWaiting(r);
    return members.MarkFull(full);
  }
  Requeue(r, now);
  r.waiting_since = since;
  members.MarkFull(full);  // last: giving the room back must not undo it
}

bool RouterCore::Impl::CountHandoffFailure(RouterRequest& r, const absl::Status& why) {
  ++r.handoff_failures;
  r.avoid_prefill = r.prefill_name;
  LogWarning("handoff.failed", {{"request", r.spec.request_id},
                                {"attempt", r.attempt},
                                {"prefill", r.avoid_prefill},
                                {"decode", r.decode_name},
                                {"reason", MessageOf(why)}});
  if (r.handoff_failures < options.handoff_attempts_max) {
    ++counters.prefill_retries;
    return true;
  }
  const std::string message =
      absl::StrFormat("the prompt's state could not be handed over in %d tries: %s",
                      r.handoff_failures, MessageOf(why));
  Fail(r, absl::IsDataLoss(why) ? absl::DataLossError(message) : absl::UnavailableError(message));
  return false;
}

}  // namespace deltamesh
