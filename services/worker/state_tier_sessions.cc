// What a StateTier does for sessions: suspended ones go down as far as there is a tier, resumed ones come up
// from wherever they are.
#include <algorithm>
#include <utility>

#include "runtime/base/status.h"
#include "services/worker/state_tier.h"

namespace deltamesh {
namespace {

// A session's state stands at the last block boundary before its end, or a little before.
constexpr size_t kLookedAt = 4;
constexpr int kReadsMax = 16;  // of one session, when what is read is damaged

const char* TierName(StoreTier tier) { return tier == StoreTier::kDisk ? "disk" : "object store"; }

SessionStoreDone Done(uint64_t ticket, const absl::Status& status) {
  SessionStoreDone done;
  done.ticket = ticket;
  done.status = status;
  return done;
}

}  // namespace

void StateTier::Abandon(uint64_t ticket) {
  absl::MutexLock lock(&abandoned_mu_);
  abandoned_.insert(ticket);
}

std::vector<SessionStoreDone> StateTier::TakeDone() {
  absl::MutexLock lock(&abandoned_mu_);
  for (const SessionStoreDone& done : done_) abandoned_.erase(done.ticket);
  return std::exchange(done_, {});
}

// ---- suspend -------------------------------------------------------------------------------------

// What is in memory goes with the session's suspension, so a listing of the bucket that is a minute old is
// not enough to rely on: others may have made room there.
void StateTier::Suspend(uint64_t ticket, std::span<const PrefixKey> path) {
  const int64_t in_bucket = objects_ == nullptr ? 0 : objects_->Find(path).snapshot.value();
  if (in_bucket == 0) return SuspendNow(ticket, path, absl::OkStatus());
  record_queue().PushUrgent(
      0,
      [this, ticket, in_bucket,
       path = std::vector<PrefixKey>(path.begin(), path.end())]() -> IoQueue::Finish {
        const absl::Status confirmed =
            IsAbandoned(ticket) ? Cancelled("nobody waits")
                                : objects_->Confirm(path[static_cast<size_t>(in_bucket - 1)]);
        return [this, ticket, path, confirmed] { SuspendNow(ticket, path, confirmed); };
      });
}

void StateTier::SuspendNow(uint64_t ticket, std::span<const PrefixKey> path,
                           const absl::Status& confirmed) {
  if (IsAbandoned(ticket)) return Answer(Done(ticket, Cancelled("nobody waits")));
  const bool asked = confirmed.ok() || absl::IsNotFound(confirmed);  // gone, the index lacks it
  if (!asked && disk_ == nullptr) return Answer(Done(ticket, confirmed));
  const int64_t memory = cache_->Find(path).snapshot.value();
  // Other threads change what the tiers have: they are asked once.
  const int64_t on_disk = disk_ == nullptr ? 0 : disk_->Find(path).snapshot.value();
  const int64_t in_bucket = objects_ == nullptr ? 0 : objects_->Find(path).snapshot.value();
  const int64_t blocks = std::max({memory, on_disk, in_bucket});
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
  // Where the bucket does not answer the disk has to have it.
  const bool elsewhere = memory == blocks || on_disk == blocks;
  const bool in_disk = on_disk == blocks, in_objects = in_bucket == blocks && (asked || !elsewhere);
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
            const bool again =
                !status.ok() && objects_ != nullptr && cache_->tree().HasSnapshot(to.back());
            if (again) return to_objects();
            below_disk(status, bytes);
          });
  }
}

// ---- resume --------------------------------------------------------------------------------------

void StateTier::Load(uint64_t ticket, std::span<const PrefixKey> path) {
  Resuming resuming;
  resuming.ticket = ticket;
  resuming.path.assign(path.begin(), path.end());
  Resume(std::move(resuming));
}

void StateTier::Resume(Resuming r) {
  if (IsAbandoned(r.ticket)) return Answer(Done(r.ticket, Cancelled("nobody waits")));
  const int64_t memory = cache_->Find(r.path).snapshot.value();
  const Deepest below = FindBelow(r.path, r.skip);
  const int64_t blocks = below.match.snapshot.value();
  // What another worker put in the bucket just now is not in our listing of it.
  if (!r.looked && objects_ != nullptr &&
      std::max(memory, blocks) < static_cast<int64_t>(r.path.size())) {
    r.looked = true;
    object_queue_->PushUrgent(0, [this, r = std::move(r)]() -> IoQueue::Finish {
      const size_t most = std::min(r.path.size(), kLookedAt);
      for (size_t back = 0; back < most && !IsAbandoned(r.ticket); ++back) {
        const absl::Status status = objects_->Look(r.path[r.path.size() - 1 - back]);
        if (!absl::IsNotFound(status)) break;
      }
      return [this, r] { Resume(r); };
    });
    return;
  }
  if (blocks <= memory || r.tries == kReadsMax) return EndResume(r, 0, "memory");
  const auto ended = [this, r, tier = below.tier](const absl::Status& status, int64_t bytes) {
    std::erase_if(resuming_, [](const StateLoadRef& l) { return l->ended_; });
    if (status.ok()) return EndResume(r, bytes, TierName(tier));
    // Damaged, or gone meanwhile: then the next best. A tier that fails otherwise will fail again.
    Resuming next = r;
    ++next.tries;
    if (!RefusalOf(status) && !absl::IsNotFound(status)) {
      next.failed = status;
      next.skip[static_cast<size_t>(tier)] = true;
    }
    Resume(std::move(next));
  };
  const auto load = BeginRead(r.path, below.tier, below.match, /*counted=*/false, ended);
  if (!load.ok()) return Answer(Done(r.ticket, load.status()));
  resuming_.push_back(*load);
}

// What is in memory by now is told: what was read may have found no room there.
void StateTier::EndResume(const Resuming& r, int64_t bytes, const char* tier) {
  const int64_t blocks = cache_->Find(r.path).snapshot.value();
  if (blocks == 0 && !r.failed.ok()) return Answer(Done(r.ticket, r.failed));
  SessionStoreDone done = Done(r.ticket, absl::OkStatus());
  done.blocks = blocks;
  done.bytes = static_cast<uint64_t>(bytes);
  done.tier = blocks > 0 ? tier : "";
  Answer(std::move(done));
}

}  // namespace deltamesh
