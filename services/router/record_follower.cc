#include "services/router/record_follower.h"

#include <algorithm>
#include <limits>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/router/session_stores.h"

namespace deltamesh {
namespace {

constexpr size_t kKeyBytes = 16;  // of SessionRecord.key

absl::Duration RetryAfter(int failures) {
  const int doublings = std::min(failures - 1, 16);
  return std::min(RecordFollower::kRetryMax, RecordFollower::kRetryFirst * (1 << doublings));
}

}  // namespace

RecordFollower::RecordFollower(const RouterOptions* options, RouterCounters* counters,
                               Membership* members, std::vector<RouterAction>* actions,
                               SessionTable* table, uint64_t* next_number)
    : options_(options),
      counters_(counters),
      members_(members),
      actions_(actions),
      table_(table),
      next_number_(next_number) {}

// ---- sessions ------------------------------------------------------------------------------------

void RecordFollower::Changed(const SessionId& id, absl::Time now) {
  now_ = now;
  const Session* session = table_->Find(id);
  auto it = tasks_.find(id);
  const bool held = it != tasks_.end() && it->second.evicted;
  if (session == nullptr && held) return;
  if (session != nullptr) lost_.erase(id);
  // Where nobody has a store there is nothing to ask for, nor to fall back to.
  const bool settled =
      session == nullptr || HasNone(*session) || (!session->record && StoresOf(members_).empty());
  if (settled) {
    if (it != tasks_.end()) Erase(it);
    return;
  }
  if (it != tasks_.end()) return;  // what is out, or waits, ends with another look at the session
  it = tasks_.try_emplace(id).first;
  SetAt(id, it->second, now);
  Pump(now);
}

bool RecordFollower::HasNone(const Session& session) const {
  return session.asked == stores_joined_ && !session.record;
}

void RecordFollower::Drop(const SessionId& id) {
  const auto it = tasks_.find(id);
  if (it != tasks_.end()) Erase(it);
}

void RecordFollower::OnEvicted(const SessionId& id, const Session& session) {
  auto it = tasks_.find(id);
  if (it == tasks_.end()) {
    // It is as its record says, has none, or nobody can have one.
    if (session.record) stamps_.Note(id, session.record->stamp);
    if (session.record || HasNone(session) || StoresOf(members_).empty()) return;
    it = tasks_.try_emplace(id).first;
    SetAt(id, it->second, now_);
  }
  const int64_t bytes = SessionTable::BytesOf(session);
  if (evicted_ >= kEvictedMax || evicted_bytes_ + bytes > options_->session_bytes_max) {
    Lose(id, session);
    return Erase(it);
  }
  it->second.evicted = session;
  ++evicted_;
  evicted_bytes_ += bytes;
}

void RecordFollower::Restore(const SessionId& id) {
  const auto it = tasks_.find(id);
  if (it == tasks_.end() || !it->second.evicted) return;
  Session session = *std::exchange(it->second.evicted, std::nullopt);
  --evicted_;
  evicted_bytes_ -= SessionTable::BytesOf(session);
  table_->Insert(id, std::move(session));
}

void RecordFollower::Lose(const SessionId& id, const Session& session) {
  ++counters_->sessions.records_lost;
  LogWarning("session.lost", {{"tokens", session.tokens->size()},
                              {"reason", "the router had no room for it, and no store took it"}});
  if (lost_.size() >= kLostMax) return;
  const auto it = tasks_.find(id);
  // What was written of it last may have arrived.
  const bool written = it != tasks_.end() && it->second.writing &&
                       it->second.version == session.version && session.record;
  lost_[id] = written          ? session.record->stamp
              : session.record ? session.record->stamp + 1
                               : std::numeric_limits<uint64_t>::max();
}

bool RecordFollower::IsOutdated(const SessionId& id, uint64_t stamp) const {
  const auto lost = lost_.find(id);
  return lost != lost_.end() && stamp < lost->second;
}

const Session* RecordFollower::Content(const SessionId& id, const Task& task) const {
  return task.evicted ? &*task.evicted : table_->Find(id);
}

// ---- tasks ---------------------------------------------------------------------------------------

void RecordFollower::SetAt(const SessionId& id, Task& task, absl::Time at) {
  due_.erase({task.at, id});
  task.at = at;
  due_.emplace(at, id);
}

void RecordFollower::EndCommand(Task& task) {
  by_number_.erase(task.number);
  task.number = 0;
  task.asked.clear();
}

void RecordFollower::Erase(Tasks::iterator it) {
  Task& task = it->second;
  EndCommand(task);
  due_.erase({task.at, it->first});
  if (task.evicted) {
    --evicted_;
    evicted_bytes_ -= SessionTable::BytesOf(*task.evicted);
  }
  tasks_.erase(it);
}

void RecordFollower::Pump(absl::Time now) {
  while (by_number_.size() < kAtOnceMax && !due_.empty() && due_.begin()->first <= now) {
    Begin(tasks_.find(due_.begin()->second), now);
  }
}

void RecordFollower::Tick(absl::Time now) {
  now_ = now;
  std::vector<SessionId> late;
  for (const auto& [number, id] : by_number_) {
    if (tasks_.at(id).at <= now) late.push_back(id);
  }
  for (const SessionId& id : late) {
    const auto it = tasks_.find(id);
    if (it == tasks_.end()) continue;
    it->second.silent = true;
    if (it->second.writing) {
      WriteEnded(it, Unavailable("the store did not answer"), now);
    } else {
      ReadEnded(it, now);
    }
  }
  Pump(now);
}

void RecordFollower::Begin(Tasks::iterator it, absl::Time now) {
  const auto& [id, task] = *it;
  const Session* session = Content(id, task);
  if (session == nullptr || HasNone(*session)) return Erase(it);
  if (!members_->identity() || StoresOf(members_).empty()) {
    return Failed(it, Unavailable("no worker has a store"), now);
  }
  due_.erase({task.at, id});
  if (session->record) {
    BeginWrite(id, it->second, *session, now);
  } else {
    BeginRead(id, it->second, now);
  }
}

mesh::SessionCommand RecordFollower::Command(const SessionId& id, Task& task, absl::Time now) {
  task.number = (*next_number_)++;
  by_number_[task.number] = id;
  mesh::SessionCommand command;
  command.set_call(task.number);
  command.set_session(id);
  command.set_deadline_unix_ns(
      static_cast<uint64_t>(absl::ToUnixNanos(now + options_->session_call_max)));
  return command;
}

void RecordFollower::Send(LinkId link, const mesh::SessionCommand& command) {
  mesh::RouterMessage message;
  *message.mutable_session() = command;
  actions_->push_back(SendToWorker{link, std::move(message)});
}

void RecordFollower::Failed(Tasks::iterator it, const absl::Status& why, absl::Time now) {
  Task& task = it->second;
  EndCommand(task);
  ++task.failures;
  ++counters_->sessions.records_retried;
  ++counters_->sessions.refused[static_cast<size_t>(SessionRefusal::kStore)];
  if (task.failures == 1) LogWarning("session.not_recorded", {{"reason", MessageOf(why)}});
  SetAt(it->first, task, now + RetryAfter(task.failures));
}

// ---- whether there is a record -------------------------------------------------------------------

void RecordFollower::BeginRead(const SessionId& id, Task& task, absl::Time now) {
  task.writing = false;
  task.silent = false;
  task.stores = stores_joined_;
  task.found.reset();
  task.at = now + options_->session_read_max;
  mesh::SessionCommand command = Command(id, task, now);
  command.mutable_read();
  for (const Worker* worker : StoresOf(members_)) {
    task.asked.insert(worker->link);
    Send(worker->link, command);
  }
}

void RecordFollower::OnRead(Tasks::iterator it, const Worker& from, const mesh::SessionReply& reply,
                            absl::Time now) {
  Task& task = it->second;
  const mesh::SessionRecord& record = reply.record();
  absl::Status status =
      reply.code() == 0 ? absl::OkStatus() : SessionStatusOf(reply, from.load.name);
  if (status.ok()) {
    status = CheckSessionRecord(record, it->first, members_->identity(), options_->vocab);
  }
  // One that is refused is refused to whoever asks for the session later, too: nothing comes back.
  if (!IsSaid(status)) task.silent = true;
  if (status.ok() && (!task.found || task.found->stamp < record.suspended_unix_ns())) {
    task.found =
        StoredRecord{record.suspended_unix_ns(), record.position(), record.key(), from.load.name};
    task.found_tokens.assign(record.tokens().begin(),
                             record.tokens().begin() + static_cast<int>(record.position()));
  }
  if (task.asked.empty()) ReadEnded(it, now);
}

void RecordFollower::ReadEnded(Tasks::iterator it, absl::Time now) {
  Task& task = it->second;
  if (task.silent) return Failed(it, Unavailable("a store did not say what it has"), now);
  EndCommand(task);
  if (const uint64_t known = stamps_.Of(it->first); task.found) {
    task.found->stamp = std::max(task.found->stamp, known);
  } else if (known > 0) {  // the store that has it is away
    task.found = StoredRecord{known, 0, "", ""};
    task.found_tokens = {};
  }
  const Session* const session = Content(it->first, task);
  if (!task.found && session != nullptr && session->record) {
    // Of a suspension that failed meanwhile, and may be there although no store had it when it was asked.
    task.failures = 0;
    SetAt(it->first, task, now);
    return Pump(now);
  }
  if (!task.found) {
    if (task.evicted) {
      task.evicted->asked = task.stores;
    } else {
      table_->SetAsked(it->first, task.stores);
    }
    if (task.stores == stores_joined_) return Erase(it);
    SetAt(it->first, task, now);
    return Pump(now);
  }
  if (session == nullptr) return Erase(it);
  StoredRecord found = *std::exchange(task.found, std::nullopt);
  found.OnlyOf(task.found_tokens, *session->tokens);
  task.found_tokens = {};
  if (task.evicted) {
    task.evicted->record = std::move(found);
  } else {
    table_->SetRecord(it->first, std::move(found));
  }
  task.failures = 0;
  SetAt(it->first, task, now);
  Pump(now);
}

// ---- writing it anew -----------------------------------------------------------------------------

mesh::SessionRecord RecordFollower::MakeRecord(const SessionId& id, const Session& session,
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
  const uint64_t before = std::max(session.record ? session.record->stamp : 0, stamps_.Of(id));
  record.set_suspended_unix_ns(std::max(stamp, before + 1));
  return record;
}

void RecordFollower::BeginWrite(const SessionId& id, Task& task, const Session& session,
                                absl::Time now) {
  const std::vector<Worker*> stores = StoresOf(members_);
  const auto same = std::find_if(stores.begin(), stores.end(), [&](const Worker* w) {
    return w->load.name == session.record->worker;
  });
  // After a failure another store's turn comes: the newest record counts, wherever it is.
  const size_t first = same == stores.end() ? 0 : static_cast<size_t>(same - stores.begin());
  const LinkId link = stores[(first + static_cast<size_t>(task.failures)) % stores.size()]->link;
  task.writing = true;
  task.version = session.version;
  task.at = now + options_->session_call_max;
  mesh::SessionCommand command = Command(id, task, now);
  command.mutable_suspend()->set_salt(session.salt);
  mesh::SessionRecord* record = command.mutable_suspend()->mutable_record();
  *record = MakeRecord(id, session, now);
  StoredRecord stored = *session.record;
  record->set_position(std::min<uint64_t>(stored.position, session.tokens->size()));
  record->set_key(stored.key.empty() ? std::string(kKeyBytes, 0) : stored.key);
  stored.stamp = record->suspended_unix_ns();
  if (task.evicted) {
    task.evicted->record = std::move(stored);
  } else {
    table_->SetRecord(id, std::move(stored));
  }
  task.asked.insert(link);
  Send(link, command);
}

void RecordFollower::WriteEnded(Tasks::iterator it, const absl::Status& status, absl::Time now) {
  Task& task = it->second;
  // ABORTED: a suspension overtook it, with the same tokens or later ones.
  if (!status.ok() && !absl::IsAborted(status)) return Failed(it, status, now);
  EndCommand(task);
  const Session* session = Content(it->first, task);
  if (session != nullptr && session->record) stamps_.Note(it->first, session->record->stamp);
  if (session != nullptr && session->version != task.version) {
    task.failures = 0;
    SetAt(it->first, task, now);
  } else {
    ++counters_->sessions.recorded;
    Erase(it);
  }
  Pump(now);
}

// ---- events --------------------------------------------------------------------------------------

bool RecordFollower::OnReply(LinkId link, const mesh::SessionReply& reply, absl::Time now) {
  const auto number = by_number_.find(reply.call());
  const Worker* from = members_->Find(link);
  if (number == by_number_.end() || from == nullptr) return false;
  const auto it = tasks_.find(number->second);
  if (it->second.asked.erase(link) == 0) return false;
  now_ = now;
  if (!it->second.writing) {
    OnRead(it, *from, reply, now);
  } else {
    WriteEnded(it, reply.code() == 0 ? absl::OkStatus() : SessionStatusOf(reply, from->load.name),
               now);
  }
  Pump(now);
  return true;
}

void RecordFollower::OnLost(LinkId link, absl::Time now) {
  std::vector<SessionId> affected;
  for (const auto& [number, id] : by_number_) {
    if (tasks_.at(id).asked.erase(link) > 0) affected.push_back(id);
  }
  for (const SessionId& id : affected) {
    const auto it = tasks_.find(id);
    it->second.silent = true;
    if (it->second.writing) {
      WriteEnded(it, Unavailable("the worker was lost"), now);
    } else if (it->second.asked.empty()) {
      ReadEnded(it, now);
    }
  }
}

}  // namespace deltamesh
