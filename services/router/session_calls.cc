#include "services/router/session_calls.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/prefix/prefix_hash.h"
#include "services/common/retry_hint.h"
#include "services/router/session_stores.h"

namespace deltamesh {
namespace {

using Kind = SessionCall::Kind;

absl::Status Running(const std::string& name) {
  return FailedPrecondition(
      "session: a turn of \"%s\" is being answered; wait for its end or cancel it", name);
}

// Nothing was written. After any other error it may have been, if the answer only was lost.
bool IsRefused(const absl::Status& written) {
  return absl::IsResourceExhausted(written) || absl::IsFailedPrecondition(written) ||
         absl::IsInvalidArgument(written) || absl::IsAborted(written);
}

absl::Status Suspending(const std::string& name) {
  return FailedPrecondition("session: \"%s\" is being suspended; call again when it is", name);
}

}  // namespace

const char* SessionRefusalName(SessionRefusal why) {
  static constexpr const char* kNames[] = {"not_found", "running", "exists",  "no_store",
                                           "full",      "lost",    "damaged", "foreign",
                                           "store",     "deadline"};
  static_assert(std::size(kNames) == static_cast<size_t>(SessionRefusal::kCount));
  return kNames[static_cast<size_t>(why)];
}

SessionCalls::SessionCalls(const RouterOptions* options, RouterCounters* counters,
                           Membership* members, const PrefixFeed* prefixes,
                           std::vector<RouterAction>* actions)
    : options_(options),
      counters_(counters),
      members_(members),
      prefixes_(prefixes),
      actions_(actions),
      table_(options->sessions_max, options->session_bytes_max,
             [this](const SessionId& id, const Session& s) { follower_.OnEvicted(id, s); }),
      known_stores_(options->store_forget),
      follower_(options, counters, members, actions, &table_, &next_number_) {}

void SessionCalls::Keep(const SessionId& id, const std::string& salt, const RequestId& turn,
                        std::vector<TokenId> tokens, bool ended, absl::Time now) {
  ++counters_->sessions.kept;
  tokens.shrink_to_fit();
  follower_.Restore(id);
  table_.Put(id, salt, std::make_shared<const std::vector<TokenId>>(std::move(tokens)), ended, now,
             turn);
  follower_.Changed(id, now);
}

void SessionCalls::Trim(const SessionId& id, const RequestId& turn, int64_t tokens,
                        absl::Time now) {
  follower_.Restore(id);
  const Session* session = table_.Find(id);
  // A later turn may have ended in the very message that this one did.
  if (session == nullptr || session->turn != turn) return;
  if (static_cast<int64_t>(session->tokens->size()) <= tokens) return;
  const auto begin = session->tokens->begin();
  table_.Put(id, std::string(session->salt),
             std::make_shared<const std::vector<TokenId>>(begin, begin + tokens),
             /*ended=*/false, now, turn);
  follower_.Changed(id, now);
}

// ---- calls ---------------------------------------------------------------------------------------

void SessionCalls::Start(SessionCall spec, bool running, bool target_running, absl::Time now) {
  CHECK(!calls_.contains(spec.id), "a session call's id is in use");
  Call& call = calls_[spec.id];
  call.spec = std::move(spec);
  call.running = running;
  call.spec.deadline = std::min(call.spec.deadline, now + options_->session_call_max);
  if (call.spec.deadline <= now) {
    return Refuse(call, SessionRefusal::kDeadline,
                  DeadlineExceeded("the deadline passed before the call began"));
  }
  const Kind kind = call.spec.kind;
  if (running && (kind == Kind::kSuspend || kind == Kind::kOpen)) {
    return Refuse(call, SessionRefusal::kRunning, Running(call.spec.name));
  }
  if (kind == Kind::kFork && call.spec.target == call.spec.session) {
    return Refuse(call, SessionRefusal::kExists,
                  InvalidArgument("new_session: \"%s\" is the session itself; use another name",
                                  call.spec.target_name));
  }
  if (target_running) {
    return Refuse(call, SessionRefusal::kRunning, Running(call.spec.target_name));
  }
  if (kind != Kind::kGet && kind != Kind::kFork && IsSuspending(call.spec.session)) {
    return Refuse(call, SessionRefusal::kRunning, Suspending(call.spec.name));
  }
  if ((kind == Kind::kSuspend || kind == Kind::kOpen) && IsOpening(call)) {
    return Refuse(call, SessionRefusal::kRunning, Running(call.spec.name));
  }
  follower_.Restore(call.spec.session);
  const Session* session = table_.Find(call.spec.session);
  if (session == nullptr || (kind != Kind::kGet && kind != Kind::kOpen)) {  // those never wait
    const absl::Status room = CheckRoom(call);
    if (!room.ok()) return Refuse(call, SessionRefusal::kFull, WithRetryAfter(room, kComeAgain));
  }
  if (session == nullptr) return Read(call, Phase::kReading, call.spec.session, now);
  AnswerKnown(call, *session, now);
}

absl::Status SessionCalls::CheckRoom(const Call& call) const {
  const int64_t most = options_->session_calls_max, share = (most + 1) / 2;
  if (live() > most) {
    return ResourceExhausted("%d session calls are going on, the router's bound; retry later",
                             most);
  }
  const int64_t of_tenant = std::count_if(calls_.begin(), calls_.end(), [&](const auto& other) {
    return other.second.spec.salt == call.spec.salt;
  });
  if (of_tenant <= share) return absl::OkStatus();
  return ResourceExhausted(
      "%d session calls are going on, the router's bound for a tenant; retry later", share);
}

void SessionCalls::AnswerKnown(Call& call, const Session& session, absl::Time now) {
  call.state.tokens = session.tokens;
  call.state.ended = session.ended;
  call.state.used = session.used;
  call.state.running = call.running;
  switch (call.spec.kind) {
    case Kind::kGet:
      call.state.holders = HoldersOf(call.spec.salt, session.tokens);
      if (!call.state.holders.empty()) call.state.position = call.state.holders.front().position;
      return Answer(call);
    case Kind::kSuspend:
      return Suspend(call, session, now);
    case Kind::kFork:
      return Fork(call, now);
    case Kind::kOpen:
      table_.Touch(call.spec.session, now);
      return Answer(call);
    case Kind::kResume:
      table_.Touch(call.spec.session, now);
      return Load(call, now);
  }
}

void SessionCalls::Cancel(const RequestId& id, absl::Time now) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  GiveUpWriting(it->second, now);
  Refuse(it->second, SessionRefusal::kDeadline, absl::CancelledError("the client left"));
}

// The session went on while its state was loaded.
void SessionCalls::TakeNewer(Call& call) {
  follower_.Restore(call.spec.session);
  const Session* newer = table_.Find(call.spec.session);
  if (newer == nullptr || newer->tokens == call.state.tokens) return;
  call.state = {.tokens = newer->tokens, .ended = newer->ended, .used = newer->used};
}

void SessionCalls::Answer(Call& call) {
  if (call.phase == Phase::kLoading) TakeNewer(call);
  actions_->push_back(SessionAnswered{call.spec.id, absl::OkStatus(), std::move(call.state)});
  by_number_.erase(call.number);
  const RequestId id = call.spec.id;
  calls_.erase(id);
}

void SessionCalls::Refuse(Call& call, SessionRefusal why, const absl::Status& status) {
  Count(why);
  LogInfo(
      "session.refused",
      {{"call", call.spec.id}, {"why", SessionRefusalName(why)}, {"reason", MessageOf(status)}});
  actions_->push_back(SessionAnswered{call.spec.id, status, {}});
  by_number_.erase(call.number);
  const RequestId id = call.spec.id;
  calls_.erase(id);
}

// ---- fork ----------------------------------------------------------------------------------------

void SessionCalls::Fork(Call& call, absl::Time now) {
  if (!call.spec.replace) {
    follower_.Restore(call.spec.target);
    if (table_.Find(call.spec.target) != nullptr) {
      return Refuse(call, SessionRefusal::kExists,
                    absl::AlreadyExistsError(absl::StrFormat(
                        "new_session: \"%s\" exists; use another name, or set replace",
                        call.spec.target_name)));
    }
    return Read(call, Phase::kReadingTarget, call.spec.target, now);
  }
  PutFork(call, /*asked=*/false, now);
}

void SessionCalls::PutFork(Call& call, bool asked, absl::Time now) {
  follower_.Restore(call.spec.target);
  if (!table_.Put(call.spec.target, call.spec.salt, call.state.tokens, call.state.ended, now)) {
    return Refuse(call, SessionRefusal::kFull,
                  ResourceExhausted("session: %d tokens are more than the router remembers; raise "
                                    "--session-mib",
                                    call.state.tokens->size()));
  }
  if (asked && follower_.NewestStored(call.spec.target) == 0) {
    table_.SetAsked(call.spec.target, call.stores);
  }
  follower_.Changed(call.spec.target, now);
  ++counters_->sessions.forked;
  Answer(call);
}

// ---- suspend -------------------------------------------------------------------------------------

void SessionCalls::Suspend(Call& call, const Session& session, absl::Time now) {
  const std::vector<Worker*> stores = StoresOf(members_);
  if (stores.empty()) {
    return Refuse(
        call, SessionRefusal::kNoStore,
        FailedPrecondition("no worker has a store to suspend \"%s\" to; start prefill and "
                           "decode workers with --store-dir",
                           call.spec.name));
  }
  Worker* chosen = nullptr;
  int64_t deepest = -1;
  for (const SessionHolding& h : HoldersOf(call.spec.salt, session.tokens)) {
    Worker* worker = members_->FindByName(h.worker);
    if (worker != nullptr && worker->registration.session_store() && h.position > deepest) {
      chosen = worker;
      deepest = h.position;
    }
  }
  if (chosen == nullptr) chosen = stores.front();
  mesh::SessionCommand command = Command(call, call.spec.session);
  command.mutable_suspend()->set_salt(call.spec.salt);
  *command.mutable_suspend()->mutable_record() =
      follower_.MakeRecord(call.spec.session, session, now);
  call.stamp = command.suspend().record().suspended_unix_ns();
  // Whatever is written of the session from now on is later than this.
  follower_.Drop(call.spec.session);
  if (session.record) {
    StoredRecord stored = *session.record;
    stored.stamp = call.stamp;
    table_.SetRecord(call.spec.session, std::move(stored));
  }
  call.phase = Phase::kWriting;
  call.phase_end = absl::InfiniteFuture();
  call.version = session.version;
  call.asked.insert(chosen->link);
  Send(chosen->link, std::move(command));
}

void SessionCalls::OnWritten(Call& call, const Worker& from, const mesh::SessionReply& reply,
                             absl::Time now) {
  if (reply.code() != 0) {
    const absl::Status status = SessionStatusOf(reply, from.load.name);
    const Session* known = table_.Find(call.spec.session);
    if (known != nullptr && !known->record && !IsRefused(status)) {
      table_.SetRecord(call.spec.session, {call.stamp, 0, "", from.load.name});
    }
    follower_.Changed(call.spec.session, now);
    return Refuse(
        call, SessionRefusal::kStore,
        Annotate(status, absl::StrFormat("session \"%s\" stays in memory", call.spec.name)));
  }
  follower_.Note(call.spec.session, call.stamp);
  const Session* now_known = table_.Find(call.spec.session);
  if (now_known != nullptr && now_known->version == call.version) {
    table_.Erase(call.spec.session);
    follower_.Drop(call.spec.session);
  } else if (now_known != nullptr) {
    // What was said meanwhile is not in the record.
    StoredRecord stored = {call.stamp, reply.position(), "", from.load.name};
    if (now_known->record) stored.stamp = std::max(stored.stamp, now_known->record->stamp);
    stored.OnlyOf(*call.state.tokens, *now_known->tokens);
    table_.SetRecord(call.spec.session, std::move(stored));
    follower_.Changed(call.spec.session, now);
  }
  ++counters_->sessions.suspended;
  call.state.position = static_cast<int64_t>(reply.position());
  call.state.bytes = reply.bytes();
  call.state.tier = reply.tier();
  call.state.worker = from.load.name;
  call.state.suspended = true;
  Answer(call);
}

// Nobody waits for the suspension any more, but its record may come to be: it counts as there, and follows
// the session, which goes on here.
void SessionCalls::GiveUpWriting(const Call& call, absl::Time now) {
  if (call.phase != Phase::kWriting || table_.Find(call.spec.session) == nullptr) return;
  const Worker* writer = call.asked.empty() ? nullptr : members_->Find(*call.asked.begin());
  table_.SetRecord(call.spec.session,
                   {call.stamp, 0, "", writer == nullptr ? "" : writer->load.name});
  follower_.Changed(call.spec.session, now);
}

bool SessionCalls::IsSuspending(const SessionId& id) const {
  return std::any_of(calls_.begin(), calls_.end(), [&](const auto& entry) {
    return entry.second.phase == Phase::kWriting && entry.second.spec.session == id;
  });
}

// A turn waits for the tokens of the session: to others it runs already.
bool SessionCalls::IsOpening(const Call& but) const {
  return std::any_of(calls_.begin(), calls_.end(), [&](const auto& entry) {
    const Call& other = entry.second;
    return &other != &but && other.spec.kind == Kind::kOpen &&
           other.spec.session == but.spec.session;
  });
}

// ---- load ----------------------------------------------------------------------------------------

void SessionCalls::Load(Call& call, absl::Time now) {
  const int64_t stored = call.record ? static_cast<int64_t>(call.record->position()) : 0;
  SessionHolding memory, cold;
  Worker* chosen = nullptr;
  for (const SessionHolding& h : HoldersOf(call.spec.salt, call.state.tokens)) {
    if (!h.cold) {
      if (h.position > memory.position) memory = h;
      continue;
    }
    Worker* worker = members_->FindByName(h.worker);
    const bool can = worker != nullptr && worker->registration.session_store() &&
                     worker->registration.role() == mesh::ROLE_DECODE;
    if (h.position > cold.position) cold = h;
    if (can && chosen == nullptr) chosen = worker;
  }
  call.state.position = memory.position;
  call.state.worker = memory.worker;
  call.state.tier = memory.position > 0 ? "memory" : "";
  if (memory.position >= std::max(stored, cold.position)) return Answer(call);
  const std::vector<Worker*> stores = StoresOf(members_);
  if (chosen == nullptr && !stores.empty()) {
    const auto reader = std::find_if(stores.begin(), stores.end(), [&](const Worker* w) {
      return w->load.name == call.read_from && w->registration.role() == mesh::ROLE_DECODE;
    });
    chosen = reader != stores.end() ? *reader : stores.front();
  }
  if (chosen == nullptr) return Answer(call);
  mesh::SessionCommand command = Command(call, call.spec.session);
  command.mutable_load()->set_salt(call.spec.salt);
  command.mutable_load()->mutable_tokens()->Assign(call.state.tokens->begin(),
                                                   call.state.tokens->end());
  call.phase = Phase::kLoading;
  call.phase_end = now + options_->session_call_max;
  call.asked.insert(chosen->link);
  Send(chosen->link, std::move(command));
}

void SessionCalls::OnLoaded(Call& call, const Worker& from, const mesh::SessionReply& reply,
                            absl::Time) {
  if (reply.code() != 0) {
    // The tokens are here: the state will be computed again.
    const absl::Status status = SessionStatusOf(reply, from.load.name);
    if (!absl::IsNotFound(status)) Count(SessionRefusalOf(status));
    LogWarning("session.not_loaded", {{"call", call.spec.id}, {"reason", MessageOf(status)}});
    return Answer(call);
  }
  call.state.position = static_cast<int64_t>(reply.position());
  call.state.bytes = reply.bytes();
  call.state.tier = reply.tier();
  call.state.worker = from.load.name;
  Answer(call);
}

// ---- events --------------------------------------------------------------------------------------

void SessionCalls::OnJoined(const mesh::Register& worker) {
  known_stores_.Joined(worker);
  if (worker.session_store()) follower_.OnStoreJoined();
}

void SessionCalls::OnReply(LinkId link, const mesh::SessionReply& reply, absl::Time now) {
  if (follower_.OnReply(link, reply, now)) return;
  const auto number = by_number_.find(reply.call());
  const auto it = number == by_number_.end() ? calls_.end() : calls_.find(number->second);
  const Worker* from = members_->Find(link);
  if (it == calls_.end() || from == nullptr || it->second.number != reply.call() ||
      it->second.asked.erase(link) == 0) {
    ++counters_->stale_messages;
    return;
  }
  Call& call = it->second;
  switch (call.phase) {
    case Phase::kReading:
    case Phase::kReadingTarget:
      return OnRead(call, *from, reply, now);
    case Phase::kWriting:
      return OnWritten(call, *from, reply, now);
    case Phase::kLoading:
      return OnLoaded(call, *from, reply, now);
  }
}

void SessionCalls::OnLost(LinkId link, const std::string& name, const absl::Status& why,
                          absl::Time now) {
  known_stores_.Left(name, now);
  follower_.OnLost(link, now);
  std::vector<RequestId> affected;
  for (auto& [id, call] : calls_) {
    if (call.asked.erase(link) > 0) affected.push_back(id);
  }
  for (const RequestId& id : affected) {
    Call& call = calls_.at(id);
    if (call.phase == Phase::kReading || call.phase == Phase::kReadingTarget) {
      call.lost = name;
      if (call.asked.empty()) ReadEnded(call, now);
    } else if (call.phase == Phase::kLoading && call.spec.kind == Kind::kOpen) {
      Answer(call);  // the tokens suffice
    } else {
      GiveUpWriting(call, now);
      Refuse(call, SessionRefusal::kLost,
             Unavailable("worker \"%s\" was lost: %s; call again", name, MessageOf(why)));
    }
  }
}

void SessionCalls::ForgetStores(absl::Time now) {
  for (const std::string& worker : known_stores_.Forget(now)) {
    ++counters_->sessions.stores_forgotten;
    LogWarning(
        "store.forgotten",
        {{"worker", worker},
         {"reason", absl::StrFormat("it was away for %s (--store-forget-minutes), or too many "
                                    "are; what only it has is not found until it is back",
                                    absl::FormatDuration(options_->store_forget))}});
  }
}

void SessionCalls::Tick(absl::Time now) {
  if (!std::exchange(ticked_, true)) young_until_ = now + kYoung;
  ForgetStores(now);
  follower_.Tick(now);
  std::vector<RequestId> due;
  for (const auto& [id, call] : calls_) {
    if (now >= call.spec.deadline || now >= call.phase_end) due.push_back(id);
  }
  for (const RequestId& id : due) {
    Call& call = calls_.at(id);
    if (now >= call.spec.deadline) {
      GiveUpWriting(call, now);
      Refuse(call, SessionRefusal::kDeadline,
             DeadlineExceeded("session \"%s\": the call's deadline passed while workers were asked",
                              call.spec.name));
      continue;
    }
    if (call.waiting) {
      Read(call, call.phase, call.spec.session, now);
      continue;
    }
    if (call.phase == Phase::kLoading) {
      Answer(call);
      continue;
    }
    for (const LinkId link : std::exchange(call.asked, {})) {
      if (const Worker* silent = members_->Find(link)) call.lost = silent->load.name;
    }
    ReadEnded(call, now);
  }
}

// ---- workers -------------------------------------------------------------------------------------

// Deepest first; of equals decode workers first, then by name. Who has a deeper state on disk than in memory
// is there with both.
std::vector<SessionHolding> SessionCalls::HoldersOf(const std::string& salt,
                                                    const SessionTokens& tokens) const {
  const auto identity = members_->identity();
  if (prefixes_->empty() || !identity) return {};
  PrefixChain chain(PrefixModel(identity->digest(), identity->state_layout()), salt);
  chain.Append(*tokens);
  std::vector<uint64_t> keys;
  for (const PrefixKey& key : chain.keys()) keys.push_back(key.index());
  if (keys.empty()) return {};
  std::vector<std::pair<bool, SessionHolding>> found;
  for (const auto& [link, match] : prefixes_->Find(keys)) {
    const Worker* worker = std::as_const(*members_).Find(link);
    if (worker == nullptr) continue;
    const auto add = [&, worker = worker](int64_t blocks, bool cold) {
      found.push_back({worker->registration.role() != mesh::ROLE_DECODE,
                       {worker->load.name, blocks * kPrefixBlockTokens, cold}});
    };
    if (match.warm.value() > 0) add(match.warm.value(), false);
    if (match.cold()) add(match.snapshot.value(), true);
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::tuple(-a.second.position, a.first, a.second.cold, a.second.worker) <
           std::tuple(-b.second.position, b.first, b.second.cold, b.second.worker);
  });
  std::vector<SessionHolding> holders;
  for (auto& [prefill, holding] : found) holders.push_back(std::move(holding));
  return holders;
}

mesh::SessionCommand SessionCalls::Command(Call& call, const SessionId& session) {
  by_number_.erase(call.number);
  call.number = next_number_++;
  by_number_[call.number] = call.spec.id;
  mesh::SessionCommand command;
  command.set_call(call.number);
  command.set_session(session);
  command.set_deadline_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(call.spec.deadline)));
  return command;
}

void SessionCalls::Send(LinkId link, mesh::SessionCommand command) {
  mesh::RouterMessage message;
  *message.mutable_session() = std::move(command);
  actions_->push_back(SendToWorker{link, std::move(message)});
}

}  // namespace deltamesh
