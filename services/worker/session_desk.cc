#include "services/worker/session_desk.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "runtime/base/log.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "runtime/prefix/prefix_hash.h"
#include "services/common/retry_hint.h"

namespace deltamesh {
namespace {

std::string BytesOf(const PrefixKey& key) {
  return std::string(key.bytes.begin(), key.bytes.end());
}

}  // namespace

std::string SessionRecordName(const std::string& id) {
  constexpr size_t kTenantBytes = 8;
  return absl::StrFormat("session-%s-%s", absl::BytesToHexString(id.substr(0, kTenantBytes)),
                         absl::BytesToHexString(id.substr(std::min(kTenantBytes, id.size()))));
}

SessionDesk::SessionDesk(SessionStore* store, WorkerLinks* links)
    : store_(store),
      links_(links),
      model_(PrefixModel(links->registration().model().digest(),
                         links->registration().model().state_layout())) {}

void SessionDesk::OnCommand(LinkId link, const mesh::SessionCommand& message, absl::Time now) {
  const std::string& worker = links_->registration().name();
  if (store_ == nullptr) {
    return Fail(link, message.call(),
                FailedPrecondition("%s has no store; start it with --store-dir", worker));
  }
  if (message.session().size() != 32) {
    return Fail(link, message.call(),
                InvalidArgument("session: %d bytes; an id has 32", message.session().size()));
  }
  if (commands_.size() + abandoned_ >= kCommandsMax) {
    return Fail(link, message.call(),
                WithRetryAfter(ResourceExhausted("%d session commands are going on; retry later",
                                                 kCommandsMax),
                               kComeAgain));
  }
  const absl::Time deadline =
      message.deadline_unix_ns() == 0
          ? absl::InfiniteFuture()
          : absl::FromUnixNanos(static_cast<int64_t>(message.deadline_unix_ns()));
  if (deadline <= now) {
    return Fail(link, message.call(), DeadlineExceeded("the command came after its deadline"));
  }
  const uint64_t ticket = next_ticket_++;
  Command& command = commands_[ticket];
  command.link = link;
  command.message = message;
  command.deadline = deadline;
  command.reply.set_call(message.call());
  switch (message.what_case()) {
    case mesh::SessionCommand::kSuspend:
      if (!message.suspend().record().key().empty()) return PutRecordAlone(ticket, command);
      command.path = PathOf(message.suspend().salt(), message.suspend().record().tokens());
      return store_->Suspend(ticket, command.path);
    case mesh::SessionCommand::kLoad:
      command.path = PathOf(message.load().salt(), message.load().tokens());
      return store_->Load(ticket, command.path);
    case mesh::SessionCommand::kRead:
      command.phase = Phase::kRecord;
      return store_->GetRecord(ticket, SessionRecordName(message.session()));
    case mesh::SessionCommand::WHAT_NOT_SET:
      commands_.erase(ticket);
      Fail(link, message.call(), InvalidArgument("a session command that asks for nothing"));
  }
}

void SessionDesk::Abandon(uint64_t ticket) {
  ++abandoned_;
  store_->Abandon(ticket);
}

void SessionDesk::OnLinkClosed(LinkId link) {
  std::erase_if(commands_, [&](const auto& entry) {
    const Command& command = entry.second;
    if (command.link != link) return false;
    if (command.message.has_suspend() && command.phase == Phase::kRecord) {
      ++abandoned_;  // its router is not there to send the record again: it is written all the same
    } else {
      Abandon(entry.first);
    }
    return true;
  });
}

void SessionDesk::Step(absl::Time now) {
  if (store_ == nullptr) return;
  for (SessionStoreDone& done : store_->TakeDone()) OnDone(std::move(done));
  std::erase_if(commands_, [&](const auto& entry) {
    const Command& command = entry.second;
    if (command.deadline > now) return false;
    Fail(command.link, command.reply.call(),
         DeadlineExceeded("the store had not answered by the command's deadline"));
    Abandon(entry.first);
    return true;
  });
}

void SessionDesk::OnDone(SessionStoreDone done) {
  const auto it = commands_.find(done.ticket);
  if (it == commands_.end()) {
    --abandoned_;
    ++late_;
    return;
  }
  Command& command = it->second;
  absl::Status status = done.status;
  if (status.ok() && command.message.has_suspend() && command.phase == Phase::kState) {
    return PutRecord(done.ticket, command, done);
  }
  if (status.ok() && command.message.has_read() &&
      !command.reply.mutable_record()->ParseFromString(done.content)) {
    command.reply.clear_record();
    status = absl::DataLossError("the session's record is no record");
  }
  if (!status.ok()) {
    Fail(command.link, command.reply.call(), status);
  } else {
    if (command.message.has_read()) {
      command.reply.set_tier(done.tier);
      command.reply.set_partial(done.partial);
    }
    if (command.message.has_load()) {
      command.reply.set_position(static_cast<uint64_t>(done.blocks * kPrefixBlockTokens));
      command.reply.set_bytes(done.bytes);
      command.reply.set_tier(done.tier);
    } else if (command.message.has_suspend()) {
      command.reply.set_bytes(command.reply.bytes() + done.bytes);
      if (command.reply.tier().empty()) command.reply.set_tier(done.tier);
    }
    ++(command.record_alone            ? recorded_
       : command.message.has_suspend() ? suspended_
       : command.message.has_load()    ? loaded_
                                       : read_);
    Send(command.link, std::move(command.reply));
  }
  commands_.erase(it);
}

// The state is written: now the record can say where it stands.
void SessionDesk::PutRecord(uint64_t ticket, Command& command, const SessionStoreDone& done) {
  mesh::SessionRecord* record = command.message.mutable_suspend()->mutable_record();
  record->set_position(static_cast<uint64_t>(done.blocks * kPrefixBlockTokens));
  record->clear_key();
  if (done.blocks > 0) {
    record->set_key(BytesOf(command.path[static_cast<size_t>(done.blocks - 1)]));
    command.reply.set_tier(done.tier);
  }
  command.reply.set_position(record->position());
  command.reply.set_bytes(done.bytes);
  command.phase = Phase::kRecord;
  store_->PutRecord(ticket, SessionRecordName(command.message.session()),
                    record->SerializeAsString());
}

// The session went on and its state stays where it is: a key of zeros stands for one that is not known.
void SessionDesk::PutRecordAlone(uint64_t ticket, Command& command) {
  mesh::SessionRecord* record = command.message.mutable_suspend()->mutable_record();
  if (record->key().find_first_not_of('\0') == std::string::npos) record->clear_key();
  command.reply.set_position(record->position());
  command.phase = Phase::kRecord;
  command.record_alone = true;
  store_->PutRecord(ticket, SessionRecordName(command.message.session()),
                    record->SerializeAsString());
}

std::vector<PrefixKey> SessionDesk::PathOf(
    const std::string& salt, const google::protobuf::RepeatedField<int32_t>& tokens) const {
  PrefixChain chain(model_, salt);
  chain.Append({tokens.data(), static_cast<size_t>(tokens.size())});
  return chain.keys();
}

void SessionDesk::Fail(LinkId link, uint64_t call, const absl::Status& status) {
  if (!absl::IsNotFound(status)) {
    ++failed_;
    LogWarning("session.failed", {{"call", call}, {"error", status.ToString()}});
  }
  mesh::SessionReply reply;
  reply.set_call(call);
  reply.set_code(static_cast<int>(status.code()));
  reply.set_message(SafeMessage(status));
  if (const auto after = RetryAfterOf(status)) {
    reply.set_retry_after_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(*after)));
  }
  Send(link, std::move(reply));
}

void SessionDesk::Send(LinkId link, mesh::SessionReply reply) {
  mesh::WorkerMessage message;
  *message.mutable_session() = std::move(reply);
  links_->Send(link, std::move(message));
}

void SessionDesk::AddMetrics(MetricList& list) const {
  const char* help =
      "Session commands by what came of them; late: the store was, and nobody waits.";
  list.Counter("session_commands_total", help, suspended_, {{"result", "suspended"}});
  list.Counter("session_commands_total", help, recorded_, {{"result", "recorded"}});
  list.Counter("session_commands_total", help, loaded_, {{"result", "loaded"}});
  list.Counter("session_commands_total", help, read_, {{"result", "read"}});
  list.Counter("session_commands_total", help, failed_, {{"result", "failed"}});
  list.Counter("session_commands_total", help, late_, {{"result", "late"}});
}

}  // namespace deltamesh
