#include "services/router/router_server.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/common/retry_hint.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kLate = absl::Milliseconds(500);  // since the last tick
constexpr int kBacklogMax = 10000;  // events of the network heard before a late one

RefusedRequest RefusalOf(const PreparedRequest& prepared) {
  const ClientRequest& request = prepared.request;
  return {.request_id = request.request_id,
          .trace = request.trace,
          .prompt_tokens = static_cast<int64_t>(request.prompt.size()),
          .status = {}};
}

absl::Status Draining() {
  return Unavailable("the router is draining; send the request to another, or again");
}

}  // namespace

RouterServer::RouterServer(RouterServerOptions options, const Clock* clock, Metrics* metrics)
    : options_(std::move(options)),
      clock_(clock),
      metrics_(metrics),
      mailbox_(static_cast<size_t>(options_.mailbox_max)),
      core_(options_.core) {}

RouterServer::~RouterServer() { Stop(); }

void RouterServer::Start(LinkOutput links, RouterWaiter waiter) {
  CHECK(!thread_.joinable(), "started twice");
  links_ = std::move(links);
  waiter_ = std::move(waiter);
  thread_ = std::thread([this] { Loop(); });
}

void RouterServer::Stop() {
  {
    absl::MutexLock lock(&mu_);
    if (std::exchange(stopped_, true)) return;
    snapshot_.ready = Unavailable("the router is stopping");
  }
  mailbox_.Close();
  Wake();
  if (thread_.joinable()) thread_.join();
}

void RouterServer::Wake() {
  if (waiter_.wake) waiter_.wake();
}

bool RouterServer::Push(Event&& event) {
  if (!mailbox_.Push(std::move(event))) return false;
  Wake();
  return true;
}

bool RouterServer::PushAlways(Event event) {
  if (!mailbox_.PushAlways(std::move(event))) return false;
  Wake();
  return true;
}

void RouterServer::Drain() {
  absl::MutexLock lock(&mu_);
  draining_ = true;
}

int64_t RouterServer::unfinished() const {
  absl::MutexLock lock(&mu_);
  return unfinished_;
}

absl::Status RouterServer::TakeIn() {
  absl::MutexLock lock(&mu_);
  if (draining_) return Draining();
  ++unfinished_;
  return absl::OkStatus();
}

void RouterServer::Ended() {
  absl::MutexLock lock(&mu_);
  --unfinished_;
}

absl::Status RouterServer::Admits() const {
  absl::MutexLock lock(&mu_);
  if (draining_) return Draining();
  RETURN_IF_ERROR(snapshot_.ready);
  if (snapshot_.gauges.live < options_.core.live_requests_max) return absl::OkStatus();
  return WithRetryAfter(
      ResourceExhausted("%d requests are in the mesh, the router's bound; retry later",
                        snapshot_.gauges.live),
      snapshot_.retry_after);
}

void RouterServer::Generate(PreparedRequest request, std::shared_ptr<AnswerSink> sink) {
  RefusedRequest refusal = RefusalOf(request);
  if (refusal.status = TakeIn(); !refusal.status.ok()) {
    NoteRefusal(refusal);
    return sink->OnError(refusal.status);
  }
  std::shared_ptr<AnswerSink> refused = sink;
  if (Push(NewRequest{std::move(request), std::move(sink)})) return;
  Ended();
  refusal.status = NotHeard();
  NoteRefusal(refusal);
  refused->OnError(refusal.status);
}

absl::Status RouterServer::NotHeard() const {
  if (mailbox_.closed()) return Unavailable("the router is stopping");
  return WithRetryAfter(ResourceExhausted("%d events wait for the router, its bound; retry later",
                                          options_.mailbox_max),
                        kComeAgain);
}

void RouterServer::NoteRefusal(RefusedRequest refusal) {
  Event event = Refused{std::move(refusal)};
  if (!Push(std::move(event))) LogRefused(std::get<Refused>(event).refusal);
}

void RouterServer::Cancel(const RequestId& id) { PushAlways(ClientLeft{id}); }

void RouterServer::CallSession(SessionCall call, SessionDone done) {
  const RequestId id = call.id;
  SessionDone refused = done;
  if (Push(NewSessionCall{std::move(call), std::move(done)})) return;
  refused({id, NotHeard(), {}});
}

void RouterServer::CancelSession(const RequestId& id) { PushAlways(SessionCallLeft{id}); }

void RouterServer::Ask(std::function<void(const RouterCore* core)> ask) {
  if (!Push(Question{ask})) ask(nullptr);
}

void RouterServer::OnLinkOpened(LinkId link) { PushAlways(LinkOpened{link}); }

bool RouterServer::OnLinkMessage(LinkId link, mesh::WorkerMessage message) {
  return Push(LinkMessage{link, std::move(message)});
}

void RouterServer::OnLinkClosed(LinkId link, absl::Status status) {
  PushAlways(LinkClosed{link, std::move(status)});
}

RouterServer::Snapshot RouterServer::snapshot() const {
  absl::MutexLock lock(&mu_);
  return snapshot_;
}

std::deque<RouterServer::Event> RouterServer::Next(absl::Duration wait) {
  if (!waiter_.wait) return mailbox_.TakeAll(wait);
  // The other work gets its turn however much comes.
  bool more = waiter_.wait(mailbox_.size() == 0 ? wait : absl::ZeroDuration());
  // After a long pause what workers said meanwhile is heard before anybody counts as silent.
  const bool late = clock_->Now() - ticked_ > kLate;
  for (int i = 0; late && more && i < kBacklogMax; ++i) more = waiter_.wait(absl::ZeroDuration());
  return mailbox_.TakeAll(absl::ZeroDuration());
}

void RouterServer::Loop() {
  while (!mailbox_.closed()) {
    for (Event& event : Next(options_.tick)) {
      const absl::Time now = clock_->Now();
      Handle(std::move(event), now);
      for (RouterAction& action : core_.TakeActions()) Perform(std::move(action), now);
    }
    const absl::Time now = clock_->Now();
    if (now - ticked_ >= options_.tick) {
      ticked_ = now;
      core_.Tick(now);
      for (RouterAction& action : core_.TakeActions()) Perform(std::move(action), now);
      Publish();
    }
  }
  const absl::Status stopping = Unavailable("the router is stopping; send the request again");
  for (Event& event : mailbox_.TakeAll(absl::ZeroDuration())) {
    if (auto* request = std::get_if<NewRequest>(&event)) {
      Refuse(std::move(*request), stopping, clock_->Now());
    } else if (const auto* refused = std::get_if<Refused>(&event)) {
      core_.NoteRefusal(refused->refusal, clock_->Now());
    } else if (auto* call = std::get_if<NewSessionCall>(&event)) {
      call->done({call->call.id, stopping, {}});
    } else if (const auto* question = std::get_if<Question>(&event)) {
      question->ask(nullptr);
    }
  }
  StopSessions();
  while (!live_.empty()) {
    const RequestId id = live_.begin()->first;
    core_.CancelClient(id, clock_->Now());
    Fail(id, stopping, clock_->Now());
  }
  for (RouterAction& action : core_.TakeActions()) Perform(std::move(action), clock_->Now());
  if (const int64_t unsettled = core_.gauges().sessions_unsettled; unsettled > 0) {
    LogWarning("session.unsettled",
               {{"sessions", unsettled},
                {"reason",
                 "the router ends before stores have what was last said in them; older "
                 "records may come back"}});
  }
}

void RouterServer::Publish() {
  const auto identity = core_.identity();
  Snapshot fresh{core_.Ready(), core_.context_tokens(), identity ? identity->digest() : "",
                 core_.gauges(), core_.RetryAfter()};
  for (const FetchSeen& fetch : core_.TakeFetches()) metrics_.Fetched(fetch);
  metrics_.Update(core_.counters(), fresh.gauges, fresh.ready.ok(), mailbox_.size());
  absl::MutexLock lock(&mu_);
  if (!stopped_) snapshot_ = std::move(fresh);
}

void RouterServer::Handle(Event event, absl::Time now) {
  if (auto* e = std::get_if<NewRequest>(&event)) {
    if (e->prepared.append) {
      OpenSession(std::move(*e), now);
    } else {
      Accept(std::move(*e), now);
    }
  } else if (auto* e = std::get_if<NewSessionCall>(&event)) {
    session_calls_[e->call.id] = std::move(e->done);
    core_.CallSession(std::move(e->call), now);
  } else if (const auto* e = std::get_if<SessionCallLeft>(&event)) {
    core_.CancelSessionCall(e->id, now);
  } else if (const auto* e = std::get_if<ClientLeft>(&event)) {
    if (opening_.contains(e->id)) return core_.CancelSessionCall(e->id, now);
    const auto it = live_.find(e->id);
    if (it == live_.end()) return;
    core_.CancelClient(e->id, now);
    metrics_.Ended(absl::StatusCode::kCancelled, now - it->second.submitted);
    live_.erase(it);
    Ended();
  } else if (const auto* e = std::get_if<LinkOpened>(&event)) {
    core_.OnLinkOpened(e->link, now);
  } else if (const auto* e = std::get_if<LinkMessage>(&event)) {
    core_.OnWorkerMessage(e->link, e->message, now);
  } else if (const auto* e = std::get_if<LinkClosed>(&event)) {
    core_.OnLinkClosed(e->link, e->status, now);
  } else if (const auto* e = std::get_if<Refused>(&event)) {
    core_.NoteRefusal(e->refusal, now);
  } else if (const auto* e = std::get_if<Question>(&event)) {
    e->ask(&core_);
  }
}

void RouterServer::Refuse(NewRequest event, const absl::Status& status, absl::Time now) {
  RefusedRequest refusal = RefusalOf(event.prepared);
  refusal.status = status;
  Refuse(event.sink, refusal, now);
}

void RouterServer::Refuse(const std::shared_ptr<AnswerSink>& sink, const RefusedRequest& refusal,
                          absl::Time now) {
  core_.NoteRefusal(refusal, now);
  metrics_.Ended(refusal.status.code(), absl::ZeroDuration());
  sink->OnError(refusal.status);
  Ended();
}

void RouterServer::OpenSession(NewRequest event, absl::Time now) {
  const ClientRequest& request = event.prepared.request;
  SessionCall call;
  call.id = request.request_id;
  call.kind = SessionCall::Kind::kOpen;
  call.session = request.session;
  call.name = event.prepared.append->name;
  call.salt = request.cache.salt();
  call.deadline = request.deadline;
  opening_.emplace(call.id, std::move(event));
  core_.CallSession(std::move(call), now);
}

void RouterServer::OnSession(SessionAnswered answer, absl::Time now) {
  if (auto call = session_calls_.extract(answer.id); !call.empty()) {
    return call.mapped()(std::move(answer));
  }
  auto opening = opening_.extract(answer.id);
  if (opening.empty()) return;
  NewRequest event = std::move(opening.mapped());
  if (!answer.status.ok()) return Refuse(std::move(event), answer.status, now);
  const absl::Status joined = event.prepared.Join(*answer.state.tokens);
  if (!joined.ok()) return Refuse(std::move(event), joined, now);
  Accept(std::move(event), now);
}

void RouterServer::StopSessions() {
  const auto cancel = [this](const auto& calls) {
    std::vector<RequestId> ids;
    for (const auto& [id, call] : calls) ids.push_back(id);
    for (const RequestId& id : ids) core_.CancelSessionCall(id, clock_->Now());
  };
  cancel(opening_);
  cancel(session_calls_);
  for (RouterAction& action : core_.TakeActions()) {
    auto* answer = std::get_if<SessionAnswered>(&action);
    if (answer == nullptr) continue;
    answer->status = Unavailable("the router is stopping; send the request again");
    OnSession(std::move(*answer), clock_->Now());
  }
}

void RouterServer::Accept(NewRequest event, absl::Time now) {
  const RequestId id = event.prepared.request.request_id;
  const auto prompt_tokens = static_cast<int64_t>(event.prepared.request.prompt.size());
  SessionId session = event.prepared.request.session;
  RefusedRequest refusal = RefusalOf(event.prepared);
  refusal.status = core_.Submit(std::move(event.prepared.request), now);
  if (!refusal.status.ok()) return Refuse(event.sink, refusal, now);
  metrics_.Accepted(prompt_tokens);
  live_[id] = Live{.answer = std::move(event.prepared.answer),
                   .sink = std::move(event.sink),
                   .submitted = now,
                   .last_token = absl::InfinitePast(),
                   .prompt_tokens = prompt_tokens,
                   .session = std::move(session)};
}

void RouterServer::Perform(RouterAction action, absl::Time now) {
  if (const auto* a = std::get_if<SendToWorker>(&action)) {
    links_.send(a->link, a->message);
  } else if (const auto* a = std::get_if<CloseLink>(&action)) {
    links_.close(a->link, a->status);
  } else if (auto* a = std::get_if<ClientTokens>(&action)) {
    Deliver(std::move(*a), now);
  } else if (const auto* a = std::get_if<ClientFinished>(&action)) {
    Complete(*a, now);
  } else if (const auto* a = std::get_if<ClientFailed>(&action)) {
    Fail(a->request_id, a->status, now);
  } else if (auto* a = std::get_if<SessionAnswered>(&action)) {
    OnSession(std::move(*a), now);
    for (RouterAction& next : core_.TakeActions()) Perform(std::move(next), now);
  }
}

void RouterServer::Deliver(ClientTokens tokens, absl::Time now) {
  const auto it = live_.find(tokens.request_id);
  if (it == live_.end())
    return;  // ended here by a stop string while its last tokens were on their way
  Live& live = it->second;
  AnswerEvent event = live.answer->Push(tokens.output);
  const auto count = static_cast<int64_t>(event.tokens.size());
  if (live.last_token == absl::InfinitePast()) {
    metrics_.FirstToken(now - live.submitted);
  } else {
    metrics_.NextTokens(now - live.last_token, count);
  }
  live.last_token = now;
  live.cached_tokens = tokens.cached_tokens;
  metrics_.Generated(count);
  if (!event.empty()) live.sink->OnEvent(std::move(event));
  if (!live.answer->stopped()) return;
  const int64_t taken = live.answer->tokens_taken();
  const bool overtaken = tokens.overtaken || core_.IsOvertaken(tokens.request_id);
  const bool ended = !core_.CompleteClient(tokens.request_id, taken, now);
  if (ended && !overtaken && !live.session.empty()) {
    core_.TrimSession(live.session, tokens.request_id, live.prompt_tokens + taken, now);
  }
  for (RouterAction& action : core_.TakeActions()) Perform(std::move(action), now);
  Complete({tokens.request_id,
            mesh::SequenceOutput::STOP_TOKEN,
            {.prompt_tokens = live.prompt_tokens,
             .completion_tokens = 0,
             .cached_tokens = live.cached_tokens},
            overtaken},
           now);
}

void RouterServer::Complete(const ClientFinished& finished, absl::Time now) {
  const RequestId& id = finished.request_id;
  const auto it = live_.find(id);
  if (it == live_.end()) return;
  Live live = std::move(it->second);
  live_.erase(it);
  if (AnswerEvent rest = live.answer->Flush(); !rest.empty()) live.sink->OnEvent(std::move(rest));
  AnswerEnd answer = live.answer->End(finished.end, finished.usage);
  if (!live.session.empty() && !finished.overtaken) {
    answer.session_tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens;
  }
  LogInfo("request.finished", {{"request", id},
                               {"reason", v1::FinishReason_Name(answer.reason)},
                               {"prompt_tokens", answer.usage.prompt_tokens},
                               {"completion_tokens", answer.usage.completion_tokens},
                               {"cached_tokens", answer.usage.cached_tokens},
                               {"seconds", absl::ToDoubleSeconds(now - live.submitted)}});
  metrics_.Ended(absl::StatusCode::kOk, now - live.submitted);
  live.sink->OnEnd(std::move(answer));
  Ended();
}

void RouterServer::Fail(const RequestId& id, const absl::Status& status, absl::Time now) {
  const auto it = live_.find(id);
  if (it == live_.end()) return;
  Live live = std::move(it->second);
  live_.erase(it);
  metrics_.Ended(status.code(), now - live.submitted);
  live.sink->OnError(status);
  Ended();
}

}  // namespace deltamesh
