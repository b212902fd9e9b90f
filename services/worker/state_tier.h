// The tiers below a worker's prefix cache: what rests in memory is written to the local disk and from there
// to an object store, and comes back when a prompt or a session asks for it.
//
// The engine's thread never waits here: it hands over counted references to memory and takes results at Poll.
// One thread does the disk's work; when there is an object store one does its work with states, so that a
// server that does not answer keeps nobody from the disk, and one that with records, so that these wait for
// no state that is sent, and no listing. What waits is bounded in bytes; what finds no room is not written.
//
//   memory -> disk           snapshots that rest `write_after` and whose session has not gone on; and, when
//                            memory is nearly full, those that would go next
//   disk -> object store     what rests `upload_after` on disk; and, when the disk is nearly full, what
//                            would go next; a suspended session at once. Without a disk: from memory.
//                            What a tier had to let go again is not put there anew before it is used again:
//                            else one that is smaller than what rests above it would be rewritten for ever.
//   disk, object store -> memory    for a prompt, when that is quicker than computing; for a session
//
// Records of sessions go to the disk, so that they are safe, and to the object store, where every worker
// finds them. The newest counts, and an older one replaces none. One that is on disk only is marked there
// until it is sent, so that a crash at any point leaves the old record or the new one in each tier and the
// mark with it: after a restart it is sent. Each record is one file and one object, put as a whole.
//
// What this cannot do: a machine that is lost for good takes what it had not sent with it, and the object
// store's older record is the newest there is then. Until its worker is back, routers that still remember the
// session go on from what was said; others are not told, since nobody is left who knows. States are only ever
// lost with it, never rolled back: their names are what they hold.
//
// Belongs to the thread that owns the engine, like PrefixCache.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "runtime/cache/prefix_cache.h"
#include "runtime/store/disk_store.h"
#include "runtime/store/object_states.h"
#include "services/worker/io_queue.h"
#include "services/worker/metric_list.h"
#include "services/worker/session_store.h"

namespace deltamesh {

struct StateTierOptions {
  absl::Duration write_after = absl::Seconds(30);
  absl::Duration upload_after = absl::Minutes(10);
  absl::Duration check_every = absl::Seconds(1);   // for what is due
  absl::Duration scan_every = absl::Seconds(10);   // for what other processes wrote to the folder
  absl::Duration list_every = absl::Seconds(60);   // and to the bucket
  absl::Duration retry_after = absl::Seconds(10);  // a write that failed
  absl::Duration state_retry_max = absl::Minutes(10);  // doubled up to this, of one state
  absl::Duration load_max = absl::Seconds(30);         // then a prompt is computed after all
  absl::Duration probe_every = absl::Minutes(1);       // of a tier that is slower than computing
  double nearly_full = 0.75;                           // of a bound
  int64_t writes_at_once = 16;                         // begun by one check
  int64_t queue_bytes_max = int64_t{4} << 30;          // of writes that wait, per queue
  int64_t loads_max = 4;                               // states being read at once
  std::string object_url;                              // as logs call the object store
  bool threads = true;  // false: RunIo does the work, for tests in one thread
};

enum class StoreTier : uint8_t { kDisk, kObjects };
inline constexpr int kStoreTiers = 2;

// A state on its way into memory for those who hold this; the last to let go cancels it.
class StateLoad {
 public:
  ~StateLoad() { *cancelled_ = true; }

 private:
  friend class StateTier;
  std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  bool ended_ = false;
  absl::Time deadline_;
};
using StateLoadRef = std::shared_ptr<StateLoad>;

class StateTier final : public SessionStore {
 public:
  // `disk` and `objects` may each be null, not both. `cache` is not owned. `notify` is called on another
  // thread when Poll has something to do; may be null.
  StateTier(const StateTierOptions& options, PrefixCache* cache, std::unique_ptr<DiskStore> disk,
            std::unique_ptr<ObjectStates> objects, std::function<void()> notify);
  ~StateTier() override;

  // Takes what has ended and begins what is due. Often.
  void Poll(absl::Time now);
  // Without threads: does all that is queued.
  void RunIo();

  // ---- prompts ----

  // Begins to read a state for a prompt, when a tier has a deeper one than memory and reading it should be
  // quicker than computing at `tokens_per_second` (0: not known, then it is). Null: compute. A tier that is
  // slower is read now and then all the same, for nobody to wait, to learn whether it still is.
  StateLoadRef Load(std::span<const PrefixKey> path, double tokens_per_second, absl::Time now);
  // The names of all blocks of a state that is on disk; empty: it is not.
  std::vector<PrefixKey> StoredPath(const PrefixKey& key) const;
  // The same as Load for another worker, which asked for the state at the end of this StoredPath. NOT_FOUND:
  // the disk does not have it any more; what is in the object store only is for every worker to read itself.
  // RESOURCE_EXHAUSTED or UNAVAILABLE: not now.
  absl::StatusOr<StateLoadRef> LoadStored(std::span<const PrefixKey> path, absl::Time now);
  // What could be read is in the prefix cache now; or it takes too long, which is counted once per load.
  bool Ended(const StateLoadRef& load, absl::Time now);

  // ---- sessions: session_store.h ----

  void Suspend(uint64_t ticket, std::span<const PrefixKey> path) override;
  void Load(uint64_t ticket, std::span<const PrefixKey> path) override;
  void PutRecord(uint64_t ticket, const std::string& name, std::string content) override;
  void GetRecord(uint64_t ticket, const std::string& name) override;
  void Abandon(uint64_t ticket) override;
  std::vector<SessionStoreDone> TakeDone() override;

  // ---- what others see ----

  // Changes of what a tier has, for those who tell routers; of the object store whole states only.
  std::vector<StoreChange> TakeChanges(StoreTier tier);
  // A snapshot left memory to make room: lost unless a tier has it or is about to.
  void OnEvicted(const PrefixKey& key);
  // Read, measured; 0: not known.
  double bytes_per_second(StoreTier tier) const { return rate(tier); }
  // Nothing is queued or under way.
  bool idle() const;
  void AddMetrics(MetricList& list) const;
  // The same series at zero, for a worker without tiers.
  static void AddNoMetrics(MetricList& list);

 private:
  struct Held;
  struct Reading;
  struct Counts {
    uint64_t hits = 0, slower = 0, busy = 0, failed = 0, late = 0,
             cancelled = 0;  // loads of prompts
    uint64_t lost = 0;       // snapshots that no tier has
    uint64_t no_room = 0;    // writes that found the queue full
    uint64_t uploads_failed = 0;
  };
  // A record as the tiers have it.
  struct Contents {
    absl::StatusOr<std::string> disk, objects;
    bool lost = false;  // the disk's, which is damaged, and had not been sent
  };
  // A state being resumed.
  struct Resuming {
    uint64_t ticket = 0;
    std::vector<PrefixKey> path;
    bool looked = false;                   // in the bucket
    int tries = 0;                         // of reading
    absl::Status failed;                   // the last of them that was no refusal
    std::array<bool, kStoreTiers> skip{};  // a tier that failed so
  };
  static void AddSeries(MetricList& list, const Counts& counts,
                        const std::array<StoreStats, kStoreTiers>& stats,
                        const std::array<int64_t, kStoreTiers>& queued);

  // What memory is written to.
  StoreTier first() const { return disk_ != nullptr ? StoreTier::kDisk : StoreTier::kObjects; }
  bool Stored(const PrefixKey& key) const;  // in first()
  IoQueue& queue(StoreTier tier) {
    return *(tier == StoreTier::kDisk ? disk_queue_ : object_queue_);
  }
  // The object store's, for records.
  IoQueue& record_queue() { return *(record_queue_ != nullptr ? record_queue_ : object_queue_); }
  std::array<IoQueue*, 3> queues() const {
    return {disk_queue_.get(), object_queue_.get(), record_queue_.get()};
  }
  double rate(StoreTier tier) const { return rates_[static_cast<size_t>(tier)]; }
  int64_t ReadBytes(int64_t blocks, int64_t have) const;
  int64_t ReadsOf(StoreTier tier) const;  // that are under way or wait

  // ---- writing ----
  using Written = std::function<void(const absl::Status& status, int64_t bytes)>;
  void WriteDue(absl::Time now);
  // Copies the snapshot at the end of `path` from memory to a tier; false when the queue is full.
  bool Write(std::vector<PrefixKey> path, StoreTier to, bool urgent, Written written);
  void UploadDue(absl::Time now);
  // Copies a state's files from the disk to the object store, parents first.
  // False when the queue is full.
  bool Upload(const PrefixKey& key, bool urgent, Written written);
  absl::StatusOr<int64_t> UploadFiles(const PrefixKey& key, const CancelCheck& cancelled);

  // ---- reading ----
  using Read = std::function<void(const absl::Status& status, int64_t bytes)>;
  // Null with a reason: nothing deeper, no room. `counted`: for a prompt; `read` may be null.
  absl::StatusOr<StateLoadRef> BeginRead(std::span<const PrefixKey> path, StoreTier tier,
                                         const StoreMatch& match, bool counted, Read read);
  void CountLoads(uint64_t loads, const absl::Status& status);
  // It took so long and had not ended: an upper bound of its tier's rate.
  void NoQuickerThan(const Reading& reading, double seconds);
  // Reads for the rate alone when that is due; not for longer than reading is worth.
  void Probe(std::span<const PrefixKey> path, StoreTier tier, const StoreMatch& match,
             absl::Duration worth);
  void EndRead(const std::shared_ptr<Reading>& reading, const absl::Status& status, int64_t bytes,
               double seconds);
  struct Deepest {
    StoreTier tier = StoreTier::kDisk;
    StoreMatch match;
  };
  Deepest FindBelow(std::span<const PrefixKey> path,
                    const std::array<bool, kStoreTiers>& skip = {}) const;
  // `confirmed`: that the bucket has its deepest one, or nothing if it is not the bucket's.
  void SuspendNow(uint64_t ticket, std::span<const PrefixKey> path, const absl::Status& confirmed);
  void Resume(Resuming resuming);
  void EndResume(const Resuming& resuming, int64_t bytes, const char* tier);

  // ---- records ----
  absl::StatusOr<std::string> ReadFromDisk(uint64_t ticket, const std::string& name, bool* lost);
  void EndGetRecord(uint64_t ticket, const std::string& name, Contents contents);
  // The disk's is to be in the object store too.
  void SendLater(const std::string& name);
  void Sent(const std::string& name, std::string_view content, const absl::Status& status);
  // Takes up what was marked, here or by a process that is gone.
  void FindUnsent();
  void SendRecords(absl::Time now);

  void Scan(absl::Time now);
  void Answer(SessionStoreDone done) { done_.push_back(std::move(done)); }
  // On any thread.
  bool IsAbandoned(uint64_t ticket) const {
    absl::MutexLock lock(&abandoned_mu_);
    return abandoned_.contains(ticket);
  }

  const StateTierOptions options_;
  PrefixCache* const cache_;
  const std::unique_ptr<DiskStore> disk_;
  const std::unique_ptr<ObjectStates> objects_;
  absl::Time now_ = absl::InfinitePast();
  absl::Time check_at_ = absl::InfinitePast(), scan_at_ = absl::InfinitePast(),
             list_at_ = absl::InfinitePast();
  // A tier that failed is left alone for a while.
  absl::Time write_at_ = absl::InfinitePast(), upload_at_ = absl::InfinitePast();
  // States that could not be written or sent on, and when to try again.
  struct Failed {
    absl::Duration wait;
    absl::Time next;
  };
  using FailedStates = absl::flat_hash_map<PrefixKey, Failed>;
  void TryLater(FailedStates& failed, const PrefixKey& key);
  FailedStates failed_writes_, failed_uploads_;
  // When those were used last that were put into the tier below by themselves.
  using PutStates = absl::flat_hash_map<PrefixKey, absl::Time>;
  static bool WasPut(const PutStates& put, const PrefixKey& key, absl::Time used);
  static void NotePut(PutStates& put, const PrefixKey& key, absl::Time used);
  PutStates written_, uploaded_;
  bool scanning_ = false, listing_ = false, uploading_ = false, sending_ = false;
  // Names of records whose newest content may be on disk only; and when to try again.
  std::set<std::string> unsent_;
  std::string send_from_;  // the round of them goes on after this one
  std::set<std::string>
      unsendable_;  // damaged, or refused for good: not tried again until written anew
  absl::Time send_at_ = absl::InfinitePast();
  absl::flat_hash_set<PrefixKey> writing_;
  absl::flat_hash_map<PrefixKey, std::shared_ptr<Reading>> loading_;
  int64_t reading_ = 0;
  std::array<double, kStoreTiers> rates_{};  // bytes per second
  std::array<absl::Time, kStoreTiers> probe_at_ = {absl::InfinitePast(), absl::InfinitePast()};
  StateLoadRef probe_;  // at most one
  absl::Time probe_until_;
  std::vector<SessionStoreDone> done_;
  std::vector<StateLoadRef> resuming_;  // keeps them from being cancelled
  mutable absl::Mutex abandoned_mu_;
  absl::flat_hash_set<uint64_t> abandoned_ ABSL_GUARDED_BY(abandoned_mu_);  // and not answered yet
  Counts counts_;
  // Last: their threads use what is above.
  std::unique_ptr<IoQueue> disk_queue_, object_queue_, record_queue_;
};

}  // namespace deltamesh
