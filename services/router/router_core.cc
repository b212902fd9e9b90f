#include "services/router/router_core.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/router/router_core_impl.h"

namespace deltamesh {

// ---- ends of requests ---------------------------------------------------------------------------

Room RouterCore::Impl::DecodeRoom(const RouterRequest& r) {
  return {.blocks = r.decode_blocks,
          .tokens = r.decode_tokens,
          .named = std::span(r.keys).first(r.decode_named)};
}

Room RouterCore::Impl::PrefillRoom(const RouterRequest& r) {
  return {.blocks = r.prefill_blocks,
          .tokens = r.prefill_tokens,
          .named = std::span(r.keys).first(r.prefill_named)};
}

void RouterCore::Impl::ReleaseDecode(RouterRequest& r) {
  if (r.decode == 0) return;
  members.Return(r.decode, DecodeRoom(r));
  r.decode = 0;
}

void RouterCore::Impl::ReleasePrefill(RouterRequest& r) {
  if (r.prefill == 0) return;
  members.Return(r.prefill, PrefillRoom(r));
  r.prefill = 0;
}

void RouterCore::Impl::Erase(RouterRequest& r) {
  ReleaseDecode(r);
  ReleasePrefill(r);
  if (r.phase == RequestPhase::kWaiting) waiting.Remove(r.spec.request_id);
  const RequestId id = r.spec.request_id;
  requests.erase(id);
}

void RouterCore::Impl::Finish(RouterRequest& r, mesh::SequenceOutput::End end, absl::Time now) {
  actions.push_back(ClientFinished{r.spec.request_id,
                                   end,
                                   {.prompt_tokens = r.prompt_tokens(),
                                    .completion_tokens = r.delivered,
                                    .cached_tokens = r.cached_tokens},
                                   r.overtaken});
  Conclude(r, absl::OkStatus());
  ++counters.finished;
  answer_tokens += (static_cast<double>(r.delivered) - answer_tokens) / 32;
  LearnAnswer(r, now);
  counters.cached_tokens += static_cast<uint64_t>(r.cached_tokens);
  KeepSession(r, end == mesh::SequenceOutput::STOP_TOKEN, now);
  Erase(r);
}

// A client that has what it wanted before the end was answered, too.
void RouterCore::Impl::LearnAnswer(const RouterRequest& r, absl::Time now) {
  if (r.delivered == 0 || r.handoff_failures > 0) return;
  answer_seconds.Seen(absl::ToDoubleSeconds(now - r.placed));
}

void RouterCore::Impl::Fail(RouterRequest& r, const absl::Status& status) {
  SendCancel(r.decode, r.spec.request_id);
  SendCancel(r.prefill, r.spec.request_id);
  Conclude(r, status);
  LogWarning("request.failed", {{"request", r.spec.request_id},
                                {"attempt", r.attempt},
                                {"tokens", r.delivered},
                                {"reason", status.ToString()}});
  actions.push_back(ClientFailed{r.spec.request_id, status});
  ++counters.failed;
  Erase(r);
}

void RouterCore::Impl::KeepSession(RouterRequest& r, bool ended, absl::Time now) {
  if (r.spec.session.empty() || r.said.empty()) return;
  if (r.overtaken) {
    ++counters.sessions.overtaken;
    return;
  }
  for (auto& [id, other] : requests) {
    if (other.spec.session == r.spec.session && other.turn < r.turn) other.overtaken = true;
  }
  std::vector<TokenId>& tokens = r.spec.prompt;
  tokens.insert(tokens.end(), r.said.begin(), r.said.end());
  sessions.Keep(r.spec.session, r.spec.cache.salt(), r.spec.request_id, std::move(tokens), ended,
                now);
}

bool RouterCore::Impl::IsRunning(const SessionId& session) const {
  return !session.empty() && std::any_of(requests.begin(), requests.end(), [&](const auto& entry) {
    return entry.second.spec.session == session;
  });
}

void RouterCore::Impl::CallSession(SessionCall call, absl::Time now) {
  const bool running = IsRunning(call.session), target_running = IsRunning(call.target);
  sessions.Start(std::move(call), running, target_running, now);
}

bool RouterCore::Impl::Cancel(const RequestId& id, std::optional<int64_t> taken, absl::Time now) {
  RouterRequest* r = Find(id);
  if (r == nullptr) return false;
  time = now;
  Conclude(*r, taken ? absl::OkStatus() : Cancelled("the client left"));
  SendCancel(r->decode, id);
  SendCancel(r->prefill, id);
  if (taken) LearnAnswer(*r, now);
  ++(taken ? counters.finished : counters.cancelled);
  if (!taken) LogInfo("request.cancelled", {{"request", id}, {"tokens", r->delivered}});
  if (taken && static_cast<size_t>(*taken) < r->said.size())
    r->said.resize(static_cast<size_t>(*taken));
  KeepSession(*r, /*ended=*/false, now);
  Erase(*r);
  PlaceWaiting(now);
  return true;
}

void RouterCore::Impl::LoseWorker(const LostWorker& lost, const absl::Status& why, absl::Time now) {
  time = now;
  const auto& [link, name, role] = lost;
  prefixes.Forget(link);
  links.Forget(link);
  sessions.OnLost(link, name, why, now);
  ++(role == mesh::ROLE_PREFILL  ? counters.prefill_lost
     : role == mesh::ROLE_DECODE ? counters.decode_lost
                                 : counters.expert_lost);
  std::vector<RequestId> affected;
  for (const auto& [id, r] : requests) {
    if (r.decode == link || r.prefill == link) affected.push_back(id);
  }
  LogWarning("worker.lost", {{"worker", name},
                             {"link", link},
                             {"requests", affected.size()},
                             {"reason", MessageOf(why)}});
  for (const RequestId& id : affected) {
    RouterRequest& r = requests.at(id);
    if (r.decode == link) {
      Fail(r, Unavailable("decode worker \"%s\" was lost: %s; send the request again", name,
                          MessageOf(why)));
      continue;
    }
    if (r.phase == RequestPhase::kHandoff) {
      const absl::Status lost =
          Unavailable("prefill worker \"%s\" was lost: %s", name, MessageOf(why));
      if (CountHandoffFailure(r, lost)) Requeue(r, now);
      continue;
    }
    r.prefill = 0;  // not asked yet, or done already
  }
  PlaceWaiting(now);
}

void RouterCore::Impl::Tick(absl::Time now) {
  time = now;
  prefixes.Sweep();
  sessions.Tick(now);
  for (const LostWorker& lost : members.Expire(now)) {
    LoseWorker(
        lost,
        Unavailable("silent for longer than its lease of %s", absl::FormatDuration(options.lease)),
        now);
  }
  std::vector<RequestId> ids;
  for (const auto& [id, r] : requests) ids.push_back(id);
  for (const RequestId& id : ids) {
    RouterRequest* r = Find(id);
    if (r == nullptr) continue;
    const absl::Duration waited = now - r->phase_since;
    if (now >= r->deadline) {
      KeepSession(*r, /*ended=*/false, now);
      Fail(*r, DeadlineExceeded("the request's deadline passed after %d of %d tokens", r->delivered,
                                r->spec.max_tokens));
    } else if (r->phase == RequestPhase::kWaiting && now - r->waiting_since > options.waiting_max) {
      FailWaiting(*r);
    } else if (r->phase == RequestPhase::kLanding && waited > options.landing_max) {
      Fail(*r, Unavailable("decode worker \"%s\" granted no landing within %s", r->decode_name,
                           absl::FormatDuration(options.landing_max)));
    } else if (r->phase == RequestPhase::kHandoff && r->prefill_gave_up &&
               now - *r->prefill_gave_up > options.verdict_wait) {
      if (CountHandoffFailure(*r, r->prefill_status)) Requeue(*r, now);
    } else if (r->phase != RequestPhase::kWaiting && waited > options.progress_max) {
      Fail(*r, Unavailable("no progress for %s at decode worker \"%s\"",
                           absl::FormatDuration(options.progress_max), r->decode_name));
    }
  }
  PlaceWaiting(now);
}

// ---- the class ----------------------------------------------------------------------------------

RouterCore::RouterCore(RouterOptions options) {
  CHECK_OK(options.Validate());
  impl_ = std::make_unique<Impl>(std::move(options));
}
RouterCore::~RouterCore() = default;

absl::Status RouterCore::Submit(ClientRequest request, absl::Time now) {
  absl::Status status = impl_->Submit(std::move(request), now);
  if (!status.ok()) ++impl_->counters.rejected;
  return status;
}

bool RouterCore::CancelClient(const RequestId& id, absl::Time now) {
  return impl_->Cancel(id, std::nullopt, now);
}

bool RouterCore::CompleteClient(const RequestId& id, int64_t taken, absl::Time now) {
  return impl_->Cancel(id, taken, now);
}

bool RouterCore::IsOvertaken(const RequestId& id) const {
  const auto found = impl_->requests.find(id);
  return found != impl_->requests.end() && found->second.overtaken;
}

void RouterCore::CallSession(SessionCall call, absl::Time now) {
  impl_->CallSession(std::move(call), now);
}

void RouterCore::TrimSession(const SessionId& session, const RequestId& turn, int64_t tokens,
                             absl::Time now) {
  impl_->sessions.Trim(session, turn, tokens, now);
}

void RouterCore::CancelSessionCall(const RequestId& id, absl::Time now) {
  impl_->sessions.Cancel(id, now);
}

void RouterCore::OnLinkOpened(LinkId link, absl::Time now) {
  impl_->members.OnLinkOpened(link, now);
}

void RouterCore::OnWorkerMessage(LinkId link, const mesh::WorkerMessage& message, absl::Time now) {
  impl_->OnMessage(link, message, now);
}

void RouterCore::OnLinkClosed(LinkId link, const absl::Status& status, absl::Time now) {
  if (const auto lost = impl_->members.OnLinkClosed(link)) impl_->LoseWorker(*lost, status, now);
}

void RouterCore::Tick(absl::Time now) { impl_->Tick(now); }

std::vector<RouterAction> RouterCore::TakeActions() { return std::exchange(impl_->actions, {}); }
std::vector<FetchSeen> RouterCore::TakeFetches() { return std::exchange(impl_->fetches_seen, {}); }

absl::Status RouterCore::Ready() const { return impl_->Ready(); }
const RouterOptions& RouterCore::options() const { return impl_->options; }
std::optional<mesh::ModelIdentity> RouterCore::identity() const {
  return impl_->members.identity();
}
int64_t RouterCore::context_tokens() const { return impl_->DecodeContexts().live; }
absl::Duration RouterCore::RetryAfter() const { return impl_->RetryAfter(impl_->waiting.tokens()); }
const DecisionLog& RouterCore::decisions() const { return impl_->decisions; }
void RouterCore::NoteRefusal(const RefusedRequest& refusal, absl::Time now) {
  impl_->TurnAway(refusal, now);
}
void RouterCore::OnConcluded(Concluded concluded) { impl_->concluded = std::move(concluded); }
const RouterCounters& RouterCore::counters() const { return impl_->counters; }

RouterGauges RouterCore::gauges() const {
  const FairQueue& waiting = impl_->waiting;
  const absl::Duration drain = impl_->DrainTime(waiting.tokens());
  return {.waiting = waiting.size(),
          .live = static_cast<int64_t>(impl_->requests.size()),
          .prefill_workers = impl_->members.Count(mesh::ROLE_PREFILL),
          .decode_workers = impl_->members.Count(mesh::ROLE_DECODE),
          .expert_workers = impl_->members.Count(mesh::ROLE_EXPERT),
          .prefix_blocks = impl_->prefixes.index().entries(),
          .prefix_objects = impl_->prefixes.index().objects(),
          .prefix_bytes = impl_->prefixes.index().bytes(),
          .links_measured = impl_->links.pairs(),
          .waiting_tokens = waiting.tokens(),
          .waiting_tenants = waiting.tenants(),
          .drain_seconds = absl::ToDoubleSeconds(drain),
          .prefix_unknown = impl_->prefixes.unknown(),
          .sessions = impl_->sessions.table().sessions(),
          .session_bytes = impl_->sessions.table().bytes(),
          .session_calls = impl_->sessions.live(),
          .sessions_unsettled = impl_->sessions.unsettled(),
          .sessions_evicted = impl_->sessions.table().evicted(),
          .stores = impl_->sessions.stores().here(),
          .stores_away = impl_->sessions.stores().away()};
}

}  // namespace deltamesh
