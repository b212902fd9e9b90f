// What the calls about sessions have to do with records: reading one from every store, and letting one follow
// the session that it is of.
#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/router/session_calls.h"

namespace deltamesh {
namespace {

using Kind = SessionCall::Kind;

constexpr size_t kFollowingMax = 1024;  // records on their way to a store
constexpr size_t kKeyBytes = 16;        // of SessionRecord.key

absl::Status NotKnown(const std::string& name, bool stores) {
  return NotFound(
      "session: \"%s\" is not known under this salt, nor is it suspended%s; begin it with a "
      "Generate that "
      "names it in cache.session and not append_to_session",
      name, stores ? "" : " where this router could see it (no worker has --store-dir)");
}

// Whether a store could say what it has: there is none, or what there is is of no use.
bool IsSaid(const absl::Status& status) {
  return status.ok() || absl::IsNotFound(status) || absl::IsDataLoss(status) ||
         absl::IsFailedPrecondition(status);
}

}  // namespace

SessionRefusal SessionRefusalOf(const absl::Status& status) {
  if (absl::IsDataLoss(status)) return SessionRefusal::kDamaged;
  if (absl::IsFailedPrecondition(status)) return SessionRefusal::kForeign;
  return SessionRefusal::kStore;
}

absl::Status SessionStatusOf(const mesh::SessionReply& reply, const std::string& worker) {
  const bool known =
      reply.code() > 0 && reply.code() <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  return absl::Status(
      known ? static_cast<absl::StatusCode>(reply.code()) : absl::StatusCode::kInternal,
      absl::StrFormat("worker \"%s\": %s", worker, reply.message()));
}

// ---- reading a record ----------------------------------------------------------------------------

void SessionCalls::Read(Call& call, Phase phase, const SessionId& session, absl::Time now) {
  call.phase = phase;
  call.phase_end = now + options_->session_read_max;
  call.refused = absl::OkStatus();
  call.lost.clear();
  mesh::SessionCommand command = Command(call, session);
  command.mutable_read();
  for (const Worker* worker : Stores()) {
    call.asked.insert(worker->link);
    Send(worker->link, command);
  }
  if (call.asked.empty()) ReadEnded(call, now);
}

void SessionCalls::OnRead(Call& call, const Worker& from, const mesh::SessionReply& reply,
                          absl::Time now) {
  const SessionId& session = call.phase == Phase::kReading ? call.spec.session : call.spec.target;
  absl::Status status =
      reply.code() == 0 ? absl::OkStatus() : SessionStatusOf(reply, from.load.name);
  if (status.ok()) {
    status = Annotate(CheckRecord(reply.record(), session),
                      absl::StrFormat("worker \"%s\"", from.load.name));
  }
  if (status.ok()) {
    if (call.phase == Phase::kReadingTarget) {
      call.asked.clear();
      return Refuse(call, SessionRefusal::kExists,
                    absl::AlreadyExistsError(absl::StrFormat(
                        "new_session: \"%s\" is suspended; use another name, or set replace",
                        call.spec.target_name)));
    }
    // Workers that share no folder may hold records of several suspensions.
    if (!call.record || call.record->suspended_unix_ns() < reply.record().suspended_unix_ns()) {
      call.record = reply.record();
      call.read_from = from.load.name;
      call.read_tier = reply.tier();
    }
  } else if (!absl::IsNotFound(status)) {
    Count(SessionRefusalOf(status));
    LogWarning("session.record_refused", {{"call", call.spec.id}, {"reason", MessageOf(status)}});
    if (!IsSaid(status)) call.lost = from.load.name;
    call.refused = std::move(status);
  }
  if (call.asked.empty()) ReadEnded(call, now);
}

void SessionCalls::ReadEnded(Call& call, absl::Time now) {
  // A store that did not answer may have a newer record than all others.
  if (!call.lost.empty()) {
    const std::string why = IsSaid(call.refused) ? "" : " (" + MessageOf(call.refused) + ")";
    return Refuse(
        call, SessionRefusal::kLost,
        Unavailable("worker \"%s\" did not say whether it has session \"%s\"%s; call again",
                    call.lost, call.spec.name, why));
  }
  if (call.phase == Phase::kReading && call.record) return Found(call, now);
  // A name whose record is worth nothing is free.
  if (call.phase == Phase::kReadingTarget) return PutFork(call, now);
  if (!call.refused.ok()) {
    const bool foreign = absl::IsFailedPrecondition(call.refused);
    return Refuse(call, SessionRefusalOf(call.refused),
                  absl::DataLossError(
                      absl::StrFormat("session: the record of \"%s\" was refused (%s); %s",
                                      call.spec.name, MessageOf(call.refused),
                                      foreign ? "use the mesh that it belongs to, or another name"
                                              : "it is left where it is; begin the session anew")));
  }
  Refuse(call, SessionRefusal::kNotFound, NotKnown(call.spec.name, !Stores().empty()));
}

absl::Status SessionCalls::CheckRecord(const mesh::SessionRecord& record,
                                       const SessionId& session) const {
  const auto identity = members_->identity();
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
                      std::all_of(record.tokens().begin(), record.tokens().end(), [&](int32_t t) {
                        return t >= 0 && (options_->vocab == 0 || t < options_->vocab);
                      });
  if (!tokens || record.position() > static_cast<uint64_t>(record.tokens_size())) {
    return absl::DataLossError("its record holds no tokens, or impossible ones");
  }
  return absl::OkStatus();
}

void SessionCalls::Found(Call& call, absl::Time now) {
  const mesh::SessionRecord& record = *call.record;
  call.state.tokens =
      std::make_shared<const std::vector<TokenId>>(record.tokens().begin(), record.tokens().end());
  call.state.ended = record.ended();
  call.state.suspended = true;
  call.state.used = absl::FromUnixNanos(static_cast<int64_t>(record.suspended_unix_ns()));
  call.state.position = static_cast<int64_t>(record.position());
  switch (call.spec.kind) {
    case Kind::kGet:
      call.state.holders = HoldersOf(call.spec.salt, call.state.tokens);
      return Answer(call);
    case Kind::kSuspend:  // it is
      call.state.worker = call.read_from;
      call.state.tier = call.read_tier;
      return Answer(call);
    case Kind::kFork:
      return Fork(call, now);
    case Kind::kOpen:
    case Kind::kResume:
      // A turn that did not wait may have made it anew meanwhile; that one is newer.
      if (const Session* newer = table_.Find(call.spec.session)) {
        call.state.tokens = newer->tokens;
        call.state.ended = newer->ended;
      } else {
        table_.Put(call.spec.session, call.spec.salt, call.state.tokens, call.state.ended, now);
        table_.SetRecord(call.spec.session, {record.suspended_unix_ns(), record.position(),
                                             record.key(), call.read_from});
        ++counters_->sessions.resumed;
      }
      call.state.suspended = false;
      return Load(call, now);
  }
}

// ---- writing a record ----------------------------------------------------------------------------

mesh::SessionRecord SessionCalls::MakeRecord(const SessionId& id, const Session& session,
                                             absl::Time now) const {
  const auto identity = members_->identity();
  mesh::SessionRecord record;
  record.set_version(kSessionRecordVersion);
  record.set_session(id);
  record.set_digest(identity->digest());
  record.set_state_layout(identity->state_layout());
  record.set_text_digest(identity->text_digest());
  record.mutable_tokens()->Assign(session.tokens->begin(), session.tokens->end());
  record.set_ended(session.ended);
  // Later than the record it replaces, whatever another router's clock said.
  const auto stamp = static_cast<uint64_t>(absl::ToUnixNanos(now));
  const uint64_t before = session.record ? session.record->stamp : 0;
  record.set_suspended_unix_ns(std::max(stamp, before + 1));
  return record;
}

// Were the record left as it was, the session would fall back to it when this router forgets or ends.
void SessionCalls::Follow(const SessionId& id, absl::Time now) {
  const Session* session = table_.Find(id);
  if (session == nullptr || !session->record || !members_->identity()) return;
  const std::vector<Worker*> stores = Stores();
  const auto same = std::find_if(stores.begin(), stores.end(), [&](const Worker* w) {
    return w->load.name == session->record->worker;
  });
  if (stores.empty() || following_.size() >= kFollowingMax) {
    Count(SessionRefusal::kStore);
    LogWarning("session.not_recorded", {{"reason", stores.empty() ? "no store" : "too many"}});
    return;
  }
  const LinkId link = (same != stores.end() ? *same : stores.front())->link;
  StoredRecord stored = *session->record;
  mesh::SessionCommand command;
  command.set_call(next_number_++);
  command.set_session(id);
  command.set_deadline_unix_ns(
      static_cast<uint64_t>(absl::ToUnixNanos(now + options_->session_call_max)));
  command.mutable_suspend()->set_salt(session->salt);
  mesh::SessionRecord* record = command.mutable_suspend()->mutable_record();
  *record = MakeRecord(id, *session, now);
  record->set_position(std::min<uint64_t>(stored.position, session->tokens->size()));
  record->set_key(stored.key.empty() ? std::string(kKeyBytes, 0) : stored.key);
  stored.stamp = record->suspended_unix_ns();
  table_.SetRecord(id, std::move(stored));
  following_[command.call()] = link;
  Send(link, std::move(command));
}

bool SessionCalls::OnFollowed(LinkId link, const mesh::SessionReply& reply) {
  const auto it = following_.find(reply.call());
  if (it == following_.end() || it->second != link) return false;
  following_.erase(it);
  // ABORTED: a suspension overtook it, with the same tokens or later ones.
  if (reply.code() != 0 && reply.code() != static_cast<int>(absl::StatusCode::kAborted)) {
    // The next turn's record takes this one's place.
    Count(SessionRefusal::kStore);
    LogWarning("session.not_recorded", {{"reason", reply.message()}});
  }
  return true;
}

}  // namespace deltamesh
