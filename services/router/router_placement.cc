#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
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
  bool prefill_capable = false;
  bool with_prefill = false;
  if (position > 0) {
    for (const Worker* w : members.Alive(mesh::ROLE_PREFILL)) {
      const mesh::Capacity& c = w->registration.capacity();
      prefill_capable |= !w->load.draining && w->load.context_tokens >= position &&
                         static_cast<int64_t>(c.latent_blocks()) * block >= position;
    }
    with_prefill = prefill_capable && ChoosePrefill(r, position);
    // One exists that could do it: wait for it rather than load the decode workers with prompts.
    if (prefill_capable && !with_prefill) return Placed::kNoRoom;
  }
  std::vector<Worker*> decode = members.Alive(mesh::ROLE_DECODE);
  std::vector<WorkerLoad> loads;
  for (const Worker* w : decode) loads.push_back(w->load);
  const RequestShape shape = {
      .request_id = r.spec.request_id,
      .compute_tokens = with_prefill ? r.prompt_tokens() - position : r.prompt_tokens(),
      .blocks = CeilDiv(reach, block),
      .context_tokens = reach};
  const std::optional<size_t> chosen = ChooseWorker(loads, shape);
  if (!chosen) {
    ReleasePrefill(r);
    return Placed::kNoRoom;
  }
  waiting.pop_front();
  r.decode = decode[*chosen]->link;
  r.decode_name = decode[*chosen]->load.name;
  r.decode_blocks = shape.blocks;
  r.decode_tokens = shape.compute_tokens;
  members.Charge(r.decode, 1, r.decode_blocks, r.decode_tokens);
  r.handoff_tokens = with_prefill ? position : 0;
  r.phase = with_prefill ? RequestPhase::kLanding : RequestPhase::kDecoding;
  r.phase_since = now;
  r.attempt = std::exchange(next_attempt, next_attempt + kAttemptsPerPlacement);
  r.refused_attempt = 0;
  SendStartDecode(r);
  LogInfo("request.placed", {{"request", r.spec.request_id},
                             {"decode", r.decode_name},
                             {"prefill", r.prefill != 0 ? r.prefill_name : "none"},
                             {"attempt", r.attempt},
                             {"prompt_tokens", r.prompt_tokens()}});
  return Placed::kYes;
}

bool RouterCore::Impl::ChoosePrefill(RouterRequest& r, int64_t position) {
  const RequestShape shape = {.request_id = r.spec.request_id,
                              .compute_tokens = position,
                              .blocks = position / BlockTokens(),
                              .context_tokens = position};
  std::vector<Worker*> workers = members.Alive(mesh::ROLE_PREFILL);
  // The worker that failed last is taken only when no other has room.
  for (const bool avoid : {true, false}) {
    std::vector<Worker*> candidates;
    std::vector<WorkerLoad> loads;
    for (Worker* w : workers) {
      if (avoid && w->load.name == r.avoid_prefill) continue;
      candidates.push_back(w);
      loads.push_back(w->load);
    }
    const std::optional<size_t> chosen = ChooseWorker(loads, shape);
    if (!chosen) continue;
    r.prefill = candidates[*chosen]->link;
    r.prefill_name = candidates[*chosen]->load.name;
    r.prefill_blocks = shape.blocks;
    r.prefill_tokens = position;
    members.Charge(r.prefill, 1, r.prefill_blocks, r.prefill_tokens);
    return true;
  }
  return false;
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
