// How calls about sessions read a record: from every store, and the newest good one counts.
#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/common/retry_hint.h"
#include "services/router/session_calls.h"
#include "services/router/session_stores.h"

namespace deltamesh {
namespace {

using Kind = SessionCall::Kind;

constexpr char kObjectStoreTier[] = "object store";  // as SessionReply.tier has it

// Why its sessions are neither served nor absent.
absl::Status MayHave(const KnownStores::Away& store, const char* what, const std::string& name,
                     const char* others) {
  return Unavailable(
      "worker \"%s\" may have %s \"%s\" in its store and is not connected%s; call again when it "
      "is, or begin the session anew; in %s it counts as gone (--store-forget-minutes)",
      store.worker, what, name, others,
      absl::FormatDuration(absl::Ceil(store.left, absl::Seconds(1))));
}

absl::Status NotKnown(const std::string& name, bool stores) {
  return NotFound(
      "session: \"%s\" is not known under this salt, nor is it suspended%s; begin it with a "
      "request that names it, without append_to_session",
      name, stores ? "" : " where this router could see it (no worker has --store-dir)");
}

}  // namespace

// ---- reading a record ----------------------------------------------------------------------------

void SessionCalls::Read(Call& call, Phase phase, const SessionId& session, absl::Time now) {
  call.phase = phase;
  call.phase_end = now + options_->session_read_max;
  call.refused = absl::OkStatus();
  call.lost.clear();
  call.disk_unread.clear();
  call.bucket_unread.clear();
  call.bucket_read = false;
  call.waiting = false;
  call.record.reset();
  call.newest = follower_.NewestStored(session);
  call.stores = follower_.stores_joined();
  mesh::SessionCommand command = Command(call, session);
  command.mutable_read();
  for (const Worker* worker : StoresOf(members_)) {
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
    status =
        Annotate(CheckSessionRecord(reply.record(), session, members_->identity(), options_->vocab),
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
    const bool of_bucket = reply.tier() == kObjectStoreTier;
    if (reply.partial()) {
      (of_bucket ? call.disk_unread : call.bucket_unread) = from.load.name;
    } else {
      call.bucket_read |= of_bucket;
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
  const SessionId& id = call.phase == Phase::kReading ? call.spec.session : call.spec.target;
  // A turn that did not wait may have made it anew meanwhile: that one is newer than any record.
  follower_.Restore(id);
  if (const Session* newer = table_.Find(id)) {
    if (call.phase == Phase::kReadingTarget) return Fork(call, now);
    const Kind kind = call.spec.kind;
    if (kind != Kind::kGet && kind != Kind::kFork && IsSuspending(id)) {
      return Refuse(call, SessionRefusal::kRunning,
                    FailedPrecondition("session: \"%s\" is being suspended; call again when it is",
                                       call.spec.name));
    }
    call.record.reset();
    return AnswerKnown(call, *newer, now);
  }
  // Or made it, and it is in a store by now.
  if (follower_.NewestStored(id) > call.newest) return Read(call, call.phase, SessionId(id), now);
  // A store that did not answer may have a newer record than all others.
  if (!call.lost.empty()) {
    const std::string why = IsSaid(call.refused) ? "" : " (" + MessageOf(call.refused) + ")";
    return Refuse(
        call, SessionRefusal::kLost,
        WithRetryAfter(
            Unavailable("worker \"%s\" did not say whether it has session \"%s\"%s; call again",
                        call.lost, call.spec.name, why),
            RetryAfterOf(call.refused).value_or(kComeAgain)));
  }
  const bool found = call.phase == Phase::kReading && call.record;
  if (found && follower_.IsOutdated(call.spec.session, call.record->suspended_unix_ns())) {
    return Refuse(
        call, SessionRefusal::kDamaged,
        absl::DataLossError(absl::StrFormat(
            "session: what was last said in \"%s\" was lost, and what stores have of it is older; "
            "begin the session anew, or raise --sessions and --session-mib",
            call.spec.name)));
  }
  const uint64_t stamp = found ? call.record->suspended_unix_ns() : 0;
  // A disk only its worker can read, the bucket all can.
  const std::string& unread = call.bucket_read ? call.disk_unread : call.Unread();
  if (found && !unread.empty() && (call.newest == 0 || stamp < call.newest)) {
    return Refuse(call, SessionRefusal::kLost,
                  WithRetryAfter(
                      Unavailable("worker \"%s\" could read only a part of its store, and the rest "
                                  "may have a newer record of session \"%s\" (store.record_unread "
                                  "in its log); call again, or begin the session anew",
                                  unread, call.spec.name),
                      kComeAgain));
  }
  if (found && !CheckNewest(call, now)) return;
  if (found) return Found(call, now);
  // A name whose record is worth nothing is free.
  if (call.phase == Phase::kReadingTarget) return PutFork(call, /*asked=*/true, now);
  NotFound(call, now);
}

bool SessionCalls::CheckNewest(Call& call, absl::Time now) {
  const uint64_t stamp = call.record->suspended_unix_ns();
  if (stamp >= call.newest) {
    follower_.Note(call.spec.session, stamp);
    return true;
  }
  if (const auto missing = known_stores_.Missing(now)) {
    Refuse(call, SessionRefusal::kLost,
           MayHave(*missing, "the newest record of session", call.spec.name,
                   ", and what others have is older"));
  } else {
    Refuse(call, SessionRefusal::kDamaged,
           absl::DataLossError(absl::StrFormat(
               "session: no store has the newest record of \"%s\" any more, and what they have is "
               "older; begin the session anew",
               call.spec.name)));
  }
  return false;
}

void SessionCalls::NotFound(Call& call, absl::Time now) {
  if (members_->Count(mesh::ROLE_DECODE) + members_->Count(mesh::ROLE_PREFILL) == 0) {
    return Refuse(
        call, SessionRefusal::kLost,
        Unavailable("no worker is connected to say whether it has session \"%s\"; call again",
                    call.spec.name));
  }
  if (const auto missing = known_stores_.Missing(now)) {
    return Refuse(call, SessionRefusal::kLost, MayHave(*missing, "session", call.spec.name, ""));
  }
  if (now < young_until_) {
    call.waiting = true;
    call.phase_end = young_until_;
    return;
  }
  if (!call.refused.ok()) {
    const bool foreign = absl::IsFailedPrecondition(call.refused);
    return Refuse(call, SessionRefusalOf(call.refused),
                  absl::DataLossError(
                      absl::StrFormat("session: the record of \"%s\" was refused (%s); %s",
                                      call.spec.name, MessageOf(call.refused),
                                      foreign ? "use the mesh that it belongs to, or another name"
                                              : "it is left where it is; begin the session anew")));
  }
  Refuse(call, SessionRefusal::kNotFound, NotKnown(call.spec.name, !StoresOf(members_).empty()));
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
      table_.Put(call.spec.session, call.spec.salt, call.state.tokens, call.state.ended, now);
      table_.SetRecord(call.spec.session, {record.suspended_unix_ns(), record.position(),
                                           record.key(), call.read_from});
      ++counters_->sessions.resumed;
      call.state.suspended = false;
      return Load(call, now);
  }
}

}  // namespace deltamesh
