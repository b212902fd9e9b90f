// What a StateTier does for sessions: suspended ones go down as far as there is a tier, resumed ones come up
// from wherever they are, and records go along.
#include <algorithm>
#include <utility>

#include "runtime/base/status.h"
#include "services/worker/state_tier.h"

namespace deltamesh {
namespace {

// A session's state stands at the last block boundary before its end, or a little before.
constexpr size_t kLookedAt = 4;

const char* TierName(StoreTier tier) { return tier == StoreTier::kDisk ? "disk" : "object store"; }

SessionStoreDone Done(uint64_t ticket, const absl::Status& status) {
  SessionStoreDone done;
  done.ticket = ticket;
  done.status = status;
  return done;
}

}  // namespace

// ---- suspend -------------------------------------------------------------------------------------

void StateTier::Suspend(uint64_t ticket, std::span<const PrefixKey> path) {
  const int64_t memory = cache_->Find(path).snapshot;
  const int64_t below = FindBelow(path).match.snapshot;
  const int64_t blocks = std::max(memory, below);
  if (blocks == 0) return Answer(Done(ticket, absl::OkStatus()));
  const std::vector<PrefixKey> to(path.begin(), path.begin() + blocks);
  const std::vector<PrefixKey> in_memory(path.begin(), path.begin() + memory);

  const auto finish = [this, ticket, in_memory, blocks](const absl::Status& status, int64_t bytes,
                                                        StoreTier tier) {
    SessionStoreDone done = Done(ticket, status);
    if (status.ok()) {
      cache_->Forget(in_memory);
      done.blocks = blocks;
      done.bytes = static_cast<uint64_t>(bytes);
      done.tier = TierName(tier);
    }
    Answer(std::move(done));
  };
  const auto below_disk = [this, key = to.back(), finish](const absl::Status& status,
                                                          int64_t written) {
    if (!status.ok() || objects_ == nullptr) return finish(status, written, StoreTier::kDisk);
    Upload(key, /*urgent=*/true, [finish, written](const absl::Status& sent, int64_t bytes) {
      // On disk it is safe from this worker's end, if not from this machine's.
      if (!sent.ok()) return finish(absl::OkStatus(), written, StoreTier::kDisk);
      finish(sent, std::max(written, bytes), StoreTier::kObjects);
    });
  };
  const bool in_disk = disk_ != nullptr && disk_->Has(to.back());
  const bool in_objects = objects_ != nullptr && objects_->Has(to.back());
  const auto to_objects = [this, to, finish] {
    Write(to, StoreTier::kObjects, /*urgent=*/true,
          [finish](const absl::Status& status, int64_t bytes) {
            finish(status, bytes, StoreTier::kObjects);
          });
  };
  if (in_objects || (in_disk && objects_ == nullptr)) {
    finish(absl::OkStatus(), 0, in_objects ? StoreTier::kObjects : StoreTier::kDisk);
  } else if (in_disk) {
    below_disk(absl::OkStatus(), 0);
  } else if (disk_ == nullptr) {
    to_objects();
  } else {
    Write(to, StoreTier::kDisk, /*urgent=*/true,
          [this, to, below_disk, to_objects](const absl::Status& status, int64_t bytes) {
            // A disk that is full or cannot be written does not keep a session from the object store.
            const bool again = !status.ok() && objects_ != nullptr &&
                               cache_->Find(to).snapshot > 0 &&
                               cache_->tree().HasSnapshot(to.back());
            if (again) return to_objects();
            below_disk(status, bytes);
          });
  }
}

// ---- resume --------------------------------------------------------------------------------------

void StateTier::Load(uint64_t ticket, std::span<const PrefixKey> path) {
  Resume(ticket, {path.begin(), path.end()}, /*looked=*/false);
}

void StateTier::Resume(uint64_t ticket, std::vector<PrefixKey> path, bool looked) {
  const int64_t memory = cache_->Find(path).snapshot;
  const Deepest below = FindBelow(path);
  const int64_t blocks = below.match.snapshot;
  // What another worker put in the bucket just now is not in our listing of it.
  if (!looked && objects_ != nullptr &&
      std::max(memory, blocks) < static_cast<int64_t>(path.size())) {
    object_queue_->PushUrgent(0, [this, ticket, path = std::move(path)]() -> IoQueue::Finish {
      const size_t most = std::min(path.size(), kLookedAt);
      for (size_t back = 0; back < most; ++back) {
        const absl::Status status = objects_->Look(path[path.size() - 1 - back]);
        if (!absl::IsNotFound(status)) break;
      }
      return [this, ticket, path] { Resume(ticket, path, /*looked=*/true); };
    });
    return;
  }
  const auto found = [this, ticket, path](int64_t at, int64_t bytes, const char* tier) {
    SessionStoreDone done = Done(ticket, absl::OkStatus());
    done.blocks = at;
    done.bytes = static_cast<uint64_t>(bytes);
    done.tier = at > 0 ? tier : "";
    Answer(std::move(done));
  };
  if (blocks <= memory) return found(memory, 0, "memory");
  const auto load =
      BeginRead(path, below.tier, below.match,
                [this, ticket, path, found, blocks, tier = below.tier](const absl::Status& status,
                                                                       int64_t bytes) {
                  std::erase_if(resuming_, [](const StateLoadRef& l) { return l->ended_; });
                  // Damaged, or gone meanwhile: then the next best.
                  if (!status.ok()) return Resume(ticket, path, /*looked=*/true);
                  found(std::max(blocks, cache_->Find(path).snapshot), bytes, TierName(tier));
                });
  if (!load.ok()) return Answer(Done(ticket, load.status()));
  resuming_.push_back(*load);
}

// ---- records -------------------------------------------------------------------------------------

// On the disk first, so that it is safe; then where every worker finds it.
void StateTier::PutRecord(uint64_t ticket, const std::string& name, std::string content) {
  const auto bytes = static_cast<int64_t>(content.size());
  auto text = std::make_shared<const std::string>(std::move(content));
  const auto answer = [this, ticket, bytes](const absl::Status& status, StoreTier tier) {
    SessionStoreDone done = Done(ticket, status);
    if (status.ok()) {
      done.bytes = static_cast<uint64_t>(bytes);
      done.tier = TierName(tier);
    }
    Answer(std::move(done));
  };
  const auto to_objects = [this, name, text, bytes, answer](const absl::Status& on_disk) {
    if (objects_ == nullptr) return answer(on_disk, StoreTier::kDisk);
    object_queue_->PushUrgent(bytes, [this, name, text, on_disk, answer]() -> IoQueue::Finish {
      return [answer, on_disk, status = objects_->PutRecord(name, *text)] {
        if (!status.ok() && on_disk.ok()) return answer(on_disk, StoreTier::kDisk);
        answer(status, StoreTier::kObjects);
      };
    });
  };
  if (disk_ == nullptr) return to_objects(Unavailable("there is no disk"));
  disk_queue_->PushUrgent(bytes, [this, name, text, to_objects]() -> IoQueue::Finish {
    return [to_objects, status = disk_->PutRecord(name, *text)] { to_objects(status); };
  });
}

// The object store has the newest when there is one: another worker may have written the record since this
// machine did.
void StateTier::GetRecord(uint64_t ticket, const std::string& name) {
  const auto answer = [this, ticket](absl::StatusOr<std::string> content, StoreTier tier) {
    SessionStoreDone done = Done(ticket, content.status());
    if (content.ok()) {
      done.content = *std::move(content);
      done.bytes = done.content.size();
      done.tier = TierName(tier);
    }
    Answer(std::move(done));
  };
  const auto from_disk = [this, name, answer](const absl::Status& why) {
    if (disk_ == nullptr) return answer(why, StoreTier::kObjects);
    disk_queue_->PushUrgent(0, [this, name, answer]() -> IoQueue::Finish {
      return [answer, content = disk_->GetRecord(name)] { answer(content, StoreTier::kDisk); };
    });
  };
  if (objects_ == nullptr) return from_disk(absl::OkStatus());
  object_queue_->PushUrgent(0, [this, name, answer, from_disk]() -> IoQueue::Finish {
    return [answer, from_disk, content = objects_->GetRecord(name)] {
      if (!content.ok()) return from_disk(content.status());
      answer(content, StoreTier::kObjects);
    };
  });
}

void StateTier::RemoveRecord(const std::string& name) {
  if (disk_ != nullptr) {
    disk_queue_->PushUrgent(0, [this, name]() -> IoQueue::Finish {
      (void)disk_->RemoveRecord(name);
      return [] {};
    });
  }
  if (objects_ != nullptr) {
    object_queue_->PushUrgent(0, [this, name]() -> IoQueue::Finish {
      (void)objects_->RemoveRecord(name);
      return [] {};
    });
  }
}

}  // namespace deltamesh
