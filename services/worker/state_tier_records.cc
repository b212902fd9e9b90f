// What a StateTier does for the records of sessions.
#include <algorithm>
#include <utility>

#include "deltamesh/mesh/session.pb.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/worker/state_tier.h"

namespace deltamesh {
namespace {

constexpr size_t kUnsentMax = 4096;  // records whose sending is tried again

// Later suspensions have larger ones; 0 for what is no record.
uint64_t StampOf(std::string_view content) {
  mesh::SessionRecord record;
  const bool parsed = record.ParseFromArray(content.data(), static_cast<int>(content.size()));
  return parsed ? record.suspended_unix_ns() : 0;
}

RecordStays NewerThan(uint64_t stamp) {
  return [stamp](std::string_view there) { return StampOf(there) > stamp; };
}

// As those who ask need to know it: none, worth nothing, not ours to read, or not known.
absl::Status AskerStatus(const absl::Status& status, const char* tier) {
  if (status.ok() || absl::IsNotFound(status) || absl::IsInvalidArgument(status)) return status;
  const std::optional<StoreRefusal> refusal = RefusalOf(status);
  if (!refusal) {
    return Unavailable("the %s could not be read (%s); call again", tier, status.ToString());
  }
  return IsForeign(*refusal) ? FailedPrecondition("%s: %s", tier, MessageOf(status)) : status;
}

// A tier that may have a record and did not say.
bool IsUnknown(const absl::StatusOr<std::string>& content) {
  return absl::IsUnavailable(AskerStatus(content.status(), ""));
}

// It is damaged, or what would be replaced is another version's: trying again is no use. Anything else
// passes, as credentials that ran out, a clock that was wrong or too many open files do.
bool IsForGood(const absl::Status& status) {
  return RefusalOf(status) || absl::IsInvalidArgument(status) || IsForeignRecord(status);
}

// The worse of two ways not to have a record: what is not known may be there.
absl::Status Worse(const absl::Status& a, const absl::Status& b) {
  if (absl::IsUnavailable(a) || absl::IsNotFound(b)) return a;
  return absl::IsUnavailable(b) || absl::IsNotFound(a) ? b : a;
}

}  // namespace

// On the disk first, so that it is safe; then where every worker finds it.
void StateTier::PutRecord(uint64_t ticket, const std::string& name, std::string content) {
  const auto bytes = static_cast<int64_t>(content.size());
  auto text = std::make_shared<const std::string>(std::move(content));
  const RecordStays stays = NewerThan(StampOf(*text));
  const auto answer = [this, ticket, bytes](const absl::Status& status, const char* tier) {
    SessionStoreDone done;
    done.ticket = ticket;
    done.status = status;
    if (status.ok()) {
      done.bytes = static_cast<uint64_t>(bytes);
      done.tier = tier;
    }
    Answer(std::move(done));
  };
  const auto to_objects = [this, ticket, name, text, bytes, stays,
                           answer](const absl::Status& on_disk) {
    if (objects_ == nullptr || absl::IsAborted(on_disk)) return answer(on_disk, "disk");
    record_queue().PushUrgent(bytes, [=, this]() -> IoQueue::Finish {
      const absl::Status sent =
          IsAbandoned(ticket) ? Cancelled("nobody waits") : objects_->PutRecord(name, *text, stays);
      if (on_disk.ok()) Sent(name, *text, sent);
      return [this, name, answer, on_disk, status = sent] {
        if (status.ok() || absl::IsAborted(status) || !on_disk.ok()) {
          return answer(status, "object store");
        }
        LogWarning("store.record", {{"record", name}, {"error", status.ToString()}});
        SendLater(name);
        answer(on_disk, "disk");
      };
    });
  };
  if (disk_ == nullptr) return to_objects(Unavailable("there is no disk"));
  disk_queue_->PushUrgent(
      bytes, [this, ticket, name, text, stays, to_objects]() -> IoQueue::Finish {
        const absl::Status put = IsAbandoned(ticket)
                                     ? Cancelled("nobody waits")
                                     : disk_->PutRecord(name, *text, stays, objects_ != nullptr);
        return [this, name, to_objects, status = put] {
          unsendable_.erase(name);
          to_objects(status);
        };
      });
}

// Both tiers are read: another worker may have written a newer one to the object store, and this one may not
// have reached it with what is on disk.
void StateTier::GetRecord(uint64_t ticket, const std::string& name) {
  const absl::Status none = absl::NotFoundError("there is no such tier");
  const auto contents = std::make_shared<Contents>(Contents{.disk = none, .objects = none});
  const auto waiting = std::make_shared<int>((disk_ != nullptr) + (objects_ != nullptr));
  const auto ended = [=, this] {
    if (--*waiting == 0) EndGetRecord(ticket, name, std::move(*contents));
  };
  if (disk_ != nullptr) {
    disk_queue_->PushUrgent(0, [=, this]() -> IoQueue::Finish {
      contents->disk = ReadFromDisk(ticket, name, &contents->lost);
      return ended;
    });
  }
  if (objects_ != nullptr) {
    record_queue().PushUrgent(0, [=, this]() -> IoQueue::Finish {
      contents->objects =
          IsAbandoned(ticket) ? Cancelled("nobody waits") : objects_->GetRecord(name);
      return ended;
    });
  }
}

absl::StatusOr<std::string> StateTier::ReadFromDisk(uint64_t ticket, const std::string& name,
                                                    bool* lost) {
  if (IsAbandoned(ticket)) return Cancelled("nobody waits");
  absl::StatusOr<std::string> content = disk_->GetRecord(name);
  *lost = RefusalOf(content.status()) && disk_->IsUnsent(name);
  return content;
}

void StateTier::EndGetRecord(uint64_t ticket, const std::string& name, Contents contents) {
  auto& [disk, objects, lost] = contents;
  SessionStoreDone done;
  done.ticket = ticket;
  if (!disk.ok() && !objects.ok()) {
    done.status =
        Worse(AskerStatus(disk.status(), "disk"), AskerStatus(objects.status(), "object store"));
    return Answer(std::move(done));
  }
  const bool disk_is_newer = disk.ok() && (!objects.ok() || StampOf(*disk) > StampOf(*objects));
  if (disk_is_newer && objects_ != nullptr) SendLater(name);
  done.content = *std::move(disk_is_newer ? disk : objects);
  done.bytes = done.content.size();
  done.tier = disk_is_newer ? "disk" : "object store";
  done.partial = IsUnknown(disk) || IsUnknown(objects) || lost;
  if (done.partial) {
    const absl::Status& unread = disk.ok() ? objects.status() : disk.status();
    LogWarning("store.record_unread",
               {{"record", name}, {"error", unread.ToString()}, {"found", done.tier}});
  }
  Answer(std::move(done));
}

void StateTier::SendLater(const std::string& name) {
  if (unsent_.size() < kUnsentMax && !unsendable_.contains(name)) unsent_.insert(name);
}

// On any thread: the object store has it now, or a newer one.
void StateTier::Sent(const std::string& name, std::string_view content,
                     const absl::Status& status) {
  if (!status.ok() && !absl::IsAborted(status)) return;
  const absl::Status marked = disk_->MarkSent(name, content);
  // Left as it is, it is sent once more, to no effect.
  if (!marked.ok()) LogWarning("store.record", {{"record", name}, {"error", marked.ToString()}});
}

void StateTier::FindUnsent() {
  if (disk_ == nullptr || objects_ == nullptr) return;
  disk_queue_->PushUrgent(0, [this]() -> IoQueue::Finish {
    return [this, names = disk_->Unsent(kUnsentMax)] {
      for (const std::string& name : names) SendLater(name);
    };
  });
}

void StateTier::SendRecords(absl::Time now) {
  if (objects_ == nullptr || disk_ == nullptr || sending_ || unsent_.empty() || now < send_at_) {
    return;
  }
  sending_ = true;
  // In turn: one for which there is no room must not keep those back that replace theirs.
  auto next = unsent_.upper_bound(send_from_);
  if (next == unsent_.end()) next = unsent_.begin();
  record_queue().PushUrgent(0, [this, name = *next]() -> IoQueue::Finish {
    const auto send = [&]() -> absl::Status {
      const absl::StatusOr<std::string> content = disk_->GetRecord(name);
      if (absl::IsNotFound(content.status())) return disk_->MarkSent(name, "");
      RETURN_IF_ERROR(content.status());
      const absl::Status put = objects_->PutRecord(name, *content, NewerThan(StampOf(*content)));
      Sent(name, *content, put);
      return put;
    };
    return [this, name, status = send()] {
      sending_ = false;
      if (status.ok() || absl::IsAborted(status)) {  // ABORTED: a newer one is there by now
        unsent_.erase(name);
        return;
      }
      ++counts_.uploads_failed;
      if (IsForGood(status)) {
        LogWarning("store.record", {{"record", name}, {"error", status.ToString()}});
        if (unsendable_.size() < kUnsentMax) unsendable_.insert(name);
        unsent_.erase(name);
        return;
      }
      send_from_ = name;
      const bool round_ends = unsent_.upper_bound(name) == unsent_.end();
      if (!absl::IsResourceExhausted(status) || round_ends) send_at_ = now_ + options_.retry_after;
    };
  });
}

}  // namespace deltamesh
