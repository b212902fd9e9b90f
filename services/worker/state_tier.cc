#include "services/worker/state_tier.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/common/store_read.h"

namespace deltamesh {
namespace {

constexpr double kRateKept = 0.7;            // of the measured rate, when a new one comes
constexpr size_t kFailedMax = 4096;          // states of which it is known
constexpr size_t kPutMax = size_t{1} << 16;  // the same

std::span<std::byte> BytesOfSlot(const SlotRef& slot, int64_t bytes) {
  return {reinterpret_cast<std::byte*>(slot.data()), static_cast<size_t>(bytes)};
}

int64_t SteadyNanos() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double SecondsSince(int64_t begin_ns) {
  return static_cast<double>(SteadyNanos() - begin_ns) * 1e-9;
}

}  // namespace

// A snapshot that is written: its memory stays until the last copy of this is gone.
struct StateTier::Held {
  std::vector<PrefixKey> path;
  SnapshotKind kind;
  StagedSnapshot staged;
  StateLayout layout;

  StateSource source() const {
    StateSource s{.path = path,
                  .kind = kind,
                  .slab = BytesOfSlot(staged.content, layout.snapshot_bytes()),
                  .latents = {}};
    for (const SlotRef& block : staged.latents)
      s.latents.push_back(BytesOfSlot(block, layout.block_bytes()));
    return s;
  }
};

// A snapshot that is read.
struct StateTier::Reading {
  std::vector<PrefixKey> path;
  SnapshotKind kind;
  StagedSnapshot staged;
  int64_t have = 0;   // leading blocks that were in memory already
  int64_t bytes = 0;  // to read
  int64_t files = 1;
  std::atomic<int64_t> begun_ns = 0;  // on the clock of SecondsSince; 0: it waits
  StoreTier tier;
  std::weak_ptr<StateLoad> load;
  std::shared_ptr<std::atomic<bool>> cancelled;
  std::vector<Read> read;
  uint64_t loads = 0;  // of prompts; how they end is counted, once each
  bool late = false;   // that is how

  StateTarget target(const StateLayout& layout) const {
    StateTarget t{
        .path = path, .slab = BytesOfSlot(staged.content, layout.snapshot_bytes()), .latents = {}};
    for (int64_t i = 0; i < staged.blocks; ++i) {
      const SlotRef& block = staged.latents[static_cast<size_t>(i)];
      t.latents.push_back(i < have ? std::span<std::byte>()
                                   : BytesOfSlot(block, layout.block_bytes()));
    }
    return t;
  }
};

StateTier::StateTier(const StateTierOptions& options, PrefixCache* cache,
                     std::unique_ptr<DiskStore> disk, std::unique_ptr<ObjectStates> objects,
                     std::function<void()> notify)
    : options_(options), cache_(cache), disk_(std::move(disk)), objects_(std::move(objects)) {
  CHECK(cache_ != nullptr && (disk_ != nullptr || objects_ != nullptr));
  if (disk_ != nullptr) {
    disk_queue_ = std::make_unique<IoQueue>(options.queue_bytes_max, options.threads, notify);
  }
  if (objects_ != nullptr) {
    object_queue_ = std::make_unique<IoQueue>(options.queue_bytes_max, options.threads, notify);
    if (objects_->records_apart()) {
      record_queue_ = std::make_unique<IoQueue>(options.queue_bytes_max, options.threads, notify);
    }
  }
}

StateTier::~StateTier() = default;

void StateTier::Poll(absl::Time now) {
  now_ = now;
  for (IoQueue* queue : queues()) {
    if (queue == nullptr) continue;
    for (IoQueue::Finish& finish : queue->TakeFinished()) finish();
  }
  if (probe_ != nullptr && (probe_->ended_ || now >= probe_until_)) probe_ = nullptr;
  Scan(now);
  if (now < check_at_) return;
  check_at_ = now + options_.check_every;
  WriteDue(now);
  UploadDue(now);
  SendRecords(now);
}

void StateTier::RunIo() {
  for (bool more = true; more;) {
    more = false;
    for (IoQueue* queue : queues()) {
      if (queue != nullptr) more |= queue->RunOne();
    }
  }
}

bool StateTier::idle() const {
  const std::array<IoQueue*, 3> all = queues();
  return std::all_of(all.begin(), all.end(),
                     [](const IoQueue* queue) { return queue == nullptr || queue->idle(); });
}

void StateTier::Scan(absl::Time now) {
  if (disk_ != nullptr && !scanning_ && now >= scan_at_) {
    scanning_ = true;
    disk_queue_->PushUrgent(0, [this]() -> IoQueue::Finish {
      const bool more = disk_->Scan();
      return [this, more] {
        scanning_ = false;
        scan_at_ = more ? now_ : now_ + options_.scan_every;
      };
    });
  }
  if (objects_ != nullptr && !listing_ && now >= list_at_) {
    listing_ = true;
    FindUnsent();
    object_queue_->PushUrgent(0, [this]() -> IoQueue::Finish {
      const absl::Status listed = objects_->List();
      if (!listed.ok()) {
        LogWarning("store.list", {{"url", options_.object_url}, {"error", listed.ToString()}});
      }
      return [this] {
        listing_ = false;
        list_at_ = now_ + options_.list_every;
      };
    });
  }
}

std::vector<StoreChange> StateTier::TakeChanges(StoreTier tier) {
  if (tier == StoreTier::kObjects) {
    return objects_ == nullptr ? std::vector<StoreChange>() : objects_->TakeChanges();
  }
  return disk_ == nullptr ? std::vector<StoreChange>() : disk_->TakeChanges();
}

// ---- writing -------------------------------------------------------------------------------------

bool StateTier::Stored(const PrefixKey& key) const {
  return disk_ != nullptr ? disk_->Has(key) : objects_->Has(key);
}

void StateTier::OnEvicted(const PrefixKey& key) {
  if (!Stored(key) && !writing_.contains(key)) ++counts_.lost;
}

void StateTier::WriteDue(absl::Time now) {
  if (now < write_at_) return;
  const PrefixTree& tree = cache_->tree();
  std::vector<PrefixKey> due;
  tree.ForEachSnapshot([&](const PrefixTree::SnapshotView& s) {
    if (!s.passed && s.used + options_.write_after <= now) due.push_back(s.key);
  });
  const FixedPool& blocks = *cache_->pools().blocks;
  const double free =
      static_cast<double>(blocks.free_slots()) / static_cast<double>(blocks.slots());
  const double used =
      static_cast<double>(tree.bytes()) / static_cast<double>(tree.options().bytes_max);
  if (used > options_.nearly_full || free < 1 - options_.nearly_full) {
    for (const PrefixKey& key : tree.NextToGo(static_cast<size_t>(options_.writes_at_once))) {
      if (!tree.View(key).passed) due.push_back(key);
    }
  }
  int64_t begun = 0;
  for (const PrefixKey& key : due) {
    if (begun == options_.writes_at_once) break;
    const absl::Time used = tree.View(key).used;
    const auto failed = failed_writes_.find(key);
    if (Stored(key) || writing_.contains(key) || WasPut(written_, key, used) ||
        (failed != failed_writes_.end() && failed->second.next > now)) {
      continue;
    }
    const auto written = [this, key, used](const absl::Status& status, int64_t) {
      if (status.ok()) {
        NotePut(written_, key, used);
        failed_writes_.erase(key);
        return;
      }
      TryLater(failed_writes_, key);
      // One that is too large says nothing of others; a full disk does.
      if (!absl::IsResourceExhausted(status) || IsDiskFull(status)) {
        write_at_ = now_ + options_.retry_after;
      }
    };
    if (!Write(tree.PathTo(key), first(), /*urgent=*/false, written)) break;
    ++begun;
  }
}

bool StateTier::Write(std::vector<PrefixKey> path, StoreTier to, bool urgent, Written written) {
  const PrefixKey key = path.back();
  auto held = std::make_shared<Held>();
  held->layout = cache_->pools().layout;
  held->kind = cache_->tree().View(key).kind;
  held->staged = cache_->Hold(path);
  held->path = std::move(path);
  const int64_t bytes =
      held->layout.snapshot_bytes() + held->staged.blocks * held->layout.block_bytes();
  IoQueue& queue = this->queue(to);
  IoQueue::Work work = [this, held = std::move(held), key, written, to,
                        &queue]() -> IoQueue::Finish {
    const absl::StatusOr<PutResult> put =
        to == StoreTier::kDisk
            ? disk_->Put(held->source())
            : objects_->Put(held->source(), [&queue] { return queue.stopping(); });
    if (!put.ok())
      LogWarning("store.write", {{"key", key.Hex()}, {"error", put.status().ToString()}});
    return [this, key, written, status = put.status(), bytes = put.ok() ? put->bytes : 0] {
      writing_.erase(key);
      written(status, bytes);
    };
  };
  if (urgent) {
    queue.PushUrgent(bytes, std::move(work));
  } else if (!queue.Push(bytes, std::move(work))) {
    ++counts_.no_room;
    return false;
  }
  writing_.insert(key);
  return true;
}

void StateTier::UploadDue(absl::Time now) {
  if (disk_ == nullptr || objects_ == nullptr || uploading_ || now < upload_at_) return;
  // The disk is left a margin: what goes next should be up before it has to go. Those that failed come after
  // all others, so that what fails for good (too large, on a bad sector) keeps nothing back.
  std::vector<PrefixKey> next;
  absl::Time used;
  for (const bool again : {false, true}) {
    if (!next.empty() || (again && failed_uploads_.empty())) break;
    next = disk_->Resting(now - options_.upload_after, options_.nearly_full, 1,
                          [&](const StoredState& state) {
                            const auto failed = failed_uploads_.find(state.key);
                            const bool known = failed != failed_uploads_.end();
                            if (known != again || (known && failed->second.next > now))
                              return false;
                            used = state.used;
                            return !WasPut(uploaded_, state.key, used) && !objects_->Has(state.key);
                          });
  }
  if (next.empty()) return;
  const PrefixKey& key = next.front();
  const auto uploaded = [this, key, used](const absl::Status& status, int64_t) {
    uploading_ = false;
    // One that is up and cannot be found there would be the next again.
    if (status.ok() && objects_->Has(key)) {
      NotePut(uploaded_, key, used);
      failed_uploads_.erase(key);
      check_at_ = absl::InfinitePast();  // the next one
    } else {
      TryLater(failed_uploads_, key);
      upload_at_ = now_ + options_.retry_after;
    }
  };
  uploading_ = Upload(key, /*urgent=*/false, uploaded);
  if (!uploading_) ++counts_.no_room;
}

void StateTier::TryLater(FailedStates& states, const PrefixKey& key) {
  if (!states.contains(key) && states.size() >= kFailedMax) {
    states.erase(std::min_element(states.begin(), states.end(), [](const auto& a, const auto& b) {
      return a.second.next < b.second.next;
    }));
  }
  Failed& failed = states[key];
  failed.wait = std::max(options_.retry_after, std::min(2 * failed.wait, options_.state_retry_max));
  failed.next = now_ + failed.wait;
}

bool StateTier::WasPut(const PutStates& put, const PrefixKey& key, absl::Time used) {
  const auto found = put.find(key);
  return found != put.end() && found->second == used;
}

void StateTier::NotePut(PutStates& put, const PrefixKey& key, absl::Time used) {
  if (put.size() >= kPutMax) put.clear();  // those that are not there any more are put once more
  put[key] = used;
}

bool StateTier::Upload(const PrefixKey& key, bool urgent, Written written) {
  IoQueue::Work work = [this, key, written]() -> IoQueue::Finish {
    const absl::StatusOr<int64_t> bytes =
        UploadFiles(key, [this] { return object_queue_->stopping(); });
    if (!bytes.ok())
      LogWarning("store.upload", {{"key", key.Hex()}, {"error", bytes.status().ToString()}});
    return [this, written, status = bytes.status(), sent = bytes.ok() ? *bytes : 0] {
      if (!status.ok()) ++counts_.uploads_failed;
      written(status, sent);
    };
  };
  if (!urgent) return object_queue_->Push(0, std::move(work));
  object_queue_->PushUrgent(0, std::move(work));
  return true;
}

absl::StatusOr<int64_t> StateTier::UploadFiles(const PrefixKey& key, const CancelCheck& cancelled) {
  const std::vector<DiskStore::File> files = disk_->FilesOf(key);
  if (files.empty()) return NotFound("the state at %s is not on disk any more", key.Hex());
  int64_t sent = 0;
  for (const DiskStore::File& file : files) {
    if (objects_->Has(file.key)) continue;
    // What its name will say was checked; whoever reads it checks its content.
    ASSIGN_OR_RETURN(const std::unique_ptr<ByteReader> bytes, disk_->OpenState(file.state));
    RETURN_IF_ERROR(objects_->PutFile(file.state, *bytes, cancelled));
    sent += bytes->size();
  }
  return sent;
}

// ---- reading -------------------------------------------------------------------------------------

int64_t StateTier::ReadBytes(int64_t blocks, int64_t have) const {
  const StateLayout& layout = cache_->pools().layout;
  return layout.snapshot_bytes() + std::max<int64_t>(0, blocks - have) * layout.block_bytes();
}

StateTier::Deepest StateTier::FindBelow(std::span<const PrefixKey> path,
                                        const std::array<bool, kStoreTiers>& skip) const {
  Deepest deepest;
  if (disk_ != nullptr && !skip[0]) deepest.match = disk_->Find(path);
  if (objects_ == nullptr || skip[1]) return deepest;
  const StoreMatch match = objects_->Find(path);
  if (match.snapshot > deepest.match.snapshot) deepest = {StoreTier::kObjects, match};
  return deepest;
}

StateLoadRef StateTier::Load(std::span<const PrefixKey> path, double tokens_per_second,
                             absl::Time now) {
  now_ = std::max(now_, now);
  const PrefixMatch memory = cache_->Find(path);
  std::array<bool, kStoreTiers> skip = {};
  for (;;) {  // the deepest, or where reading that takes too long what the other tier has
    const Deepest below = FindBelow(path, skip);
    const int64_t blocks = below.match.snapshot.value();
    if (blocks <= memory.snapshot.value()) break;
    const StoreRead read = {.bytes = ReadBytes(blocks, memory.latents.value()),
                            .files = below.match.files,
                            .ahead = ReadsOf(below.tier)};
    const int64_t saved = (blocks - memory.snapshot.value()) * kBlockTokens;
    if (ReadsFromStore(read, saved, rate(below.tier), tokens_per_second)) {
      const auto load = BeginRead(path, below.tier, below.match, /*counted=*/true, nullptr);
      if (load.ok()) return *load;
      ++counts_.busy;
      return nullptr;
    }
    skip[static_cast<size_t>(below.tier)] = true;
    Probe(path, below.tier, below.match,
          absl::Seconds(static_cast<double>(saved) / tokens_per_second));
  }
  counts_.slower += skip != std::array<bool, kStoreTiers>{};
  return nullptr;
}

int64_t StateTier::ReadsOf(StoreTier tier) const {
  return std::count_if(loading_.begin(), loading_.end(),
                       [&](const auto& one) { return one.second->tier == tier; });
}

// What prompts do not read is not measured by them, and would stay slow for ever. Nobody waits for a probe,
// and what it brings is kept. It costs, each `probe_every`, memory for one state, one of `loads_max`, and the
// tier's thread for as long as computing the state takes: so long a session or a record may have to wait.
void StateTier::Probe(std::span<const PrefixKey> path, StoreTier tier, const StoreMatch& match,
                      absl::Duration worth) {
  absl::Time& at = probe_at_[static_cast<size_t>(tier)];
  if (probe_ != nullptr || now_ < at) return;
  at = now_ + options_.probe_every;
  const auto load = BeginRead(path, tier, match, /*counted=*/false, nullptr);
  if (!load.ok()) return;
  probe_ = *load;
  probe_until_ = now_ + std::min(worth, options_.load_max);
}

void StateTier::NoQuickerThan(const Reading& reading, double seconds) {
  double& rate = rates_[static_cast<size_t>(reading.tier)];
  const double of_bytes = seconds - kStoreFileSeconds * static_cast<double>(reading.files);
  const double most = static_cast<double>(reading.bytes) / std::max(of_bytes, 1e-6);
  // One that ended early, and says no more than was known, is no measurement.
  if (most >= (rate > 0 ? rate : kAssumedStoreBytesPerSecond)) return;
  rate = most;
  probe_at_[static_cast<size_t>(reading.tier)] = now_ + options_.probe_every;
}

void StateTier::CountLoads(uint64_t loads, const absl::Status& status) {
  (status.ok()                 ? counts_.hits
   : absl::IsCancelled(status) ? counts_.cancelled
                               : counts_.failed) += loads;
}

// Each file names the blocks that no file above it has.
std::vector<PrefixKey> StateTier::StoredPath(const PrefixKey& key) const {
  std::vector<PrefixKey> path;
  if (disk_ == nullptr) return path;
  for (const DiskStore::File& file : disk_->FilesOf(key)) {
    const StoredState& s = file.state;
    if (static_cast<int64_t>(path.size()) < s.from ||
        static_cast<int64_t>(s.keys.size()) != s.blocks - s.from) {
      return {};
    }
    path.resize(static_cast<size_t>(s.from));
    path.insert(path.end(), s.keys.begin(), s.keys.end());
  }
  return path;
}

absl::StatusOr<StateLoadRef> StateTier::LoadStored(std::span<const PrefixKey> path,
                                                   absl::Time now) {
  CHECK(disk_ != nullptr && !path.empty());
  now_ = std::max(now_, now);
  const StoreMatch match = disk_->Find(path);
  if (match.snapshot.value() != static_cast<int64_t>(path.size())) {
    return NotFound("the state at %s is not on disk", path.back().Hex());
  }
  absl::StatusOr<StateLoadRef> load =
      BeginRead(path, StoreTier::kDisk, match, /*counted=*/true, nullptr);
  if (!load.ok()) ++counts_.busy;
  return load;
}

absl::StatusOr<StateLoadRef> StateTier::BeginRead(std::span<const PrefixKey> path, StoreTier tier,
                                                  const StoreMatch& match, bool counted,
                                                  Read read) {
  const std::span<const PrefixKey> to = path.first(static_cast<size_t>(match.snapshot.value()));
  if (const auto known = loading_.find(to.back()); known != loading_.end()) {
    // Somebody waits for the same; one that nobody waits for any more is about to end.
    Reading& reading = *known->second;
    if (StateLoadRef load = reading.load.lock(); load != nullptr && !load->ended_) {
      if (read) reading.read.push_back(std::move(read));
      reading.loads += counted ? 1 : 0;
      return load;
    }
    return Unavailable("the same state was being read and is not wanted any more");
  }
  if (reading_ >= options_.loads_max)
    return ResourceExhausted("%d states are being read", reading_);
  auto reading = std::make_shared<Reading>();
  reading->have = std::min(cache_->Find(to).latents.value(), match.snapshot.value());
  ASSIGN_OR_RETURN(reading->staged, cache_->Reserve(to));
  reading->path.assign(to.begin(), to.end());
  reading->kind = match.kind;
  reading->tier = tier;
  reading->files = match.files;
  reading->bytes = ReadBytes(match.snapshot.value(), reading->have);
  if (read) reading->read.push_back(std::move(read));
  reading->loads = counted ? 1 : 0;
  const auto load = std::make_shared<StateLoad>();
  load->deadline_ = now_ + options_.load_max;
  reading->load = load;
  reading->cancelled = load->cancelled_;
  loading_[to.back()] = reading;
  ++reading_;
  IoQueue& from = queue(tier);
  from.PushUrgent(reading->bytes, [this, reading, &from]() -> IoQueue::Finish {
    const int64_t begin = SteadyNanos();
    reading->begun_ns = begin;
    const CancelCheck cancelled = [&] { return *reading->cancelled || from.stopping(); };
    const StateTarget target = reading->target(cache_->pools().layout);
    const absl::StatusOr<int64_t> bytes =
        cancelled()                         ? absl::StatusOr<int64_t>(Cancelled("nobody waits"))
        : reading->tier == StoreTier::kDisk ? disk_->Read(target, cancelled)
                                            : objects_->Read(target, cancelled);
    return [this, reading, status = bytes.status(), bytes = bytes.ok() ? *bytes : 0,
            seconds = SecondsSince(begin)] { EndRead(reading, status, bytes, seconds); };
  });
  return load;
}

void StateTier::EndRead(const std::shared_ptr<Reading>& reading, const absl::Status& status,
                        int64_t bytes, double seconds) {
  --reading_;
  loading_.erase(reading->path.back());
  if (status.ok()) {
    double& rate = rates_[static_cast<size_t>(reading->tier)];
    const double measured = static_cast<double>(bytes) / std::max(seconds, 1e-6);
    rate = rate == 0 ? measured : kRateKept * rate + (1 - kRateKept) * measured;
    probe_at_[static_cast<size_t>(reading->tier)] = now_ + options_.probe_every;
    const SnapshotSpec spec = {.blocks = reading->staged.blocks, .kind = reading->kind};
    cache_->Publish(reading->path, std::move(reading->staged), spec, now_);
  } else if (!RefusalOf(status) && !absl::IsNotFound(status)) {
    // A bucket that is down is left alone for a while, and then fails at once: that is not quick.
    const bool left_alone = reading->tier == StoreTier::kObjects && absl::IsUnavailable(status);
    NoQuickerThan(*reading, left_alone ? absl::ToDoubleSeconds(options_.load_max) : seconds);
  }
  if (const StateLoadRef load = reading->load.lock()) load->ended_ = true;
  if (!reading->late) CountLoads(reading->loads, status);
  for (const Read& read : reading->read) read(status, bytes);
}

bool StateTier::Ended(const StateLoadRef& load, absl::Time now) {
  if (!load->ended_ && now >= load->deadline_) {
    load->ended_ = true;  // for all who wait; what arrives later is kept all the same
    // Known at once: when the read itself ends, if it hangs, nobody can tell.
    for (const auto& [key, reading] : loading_) {
      if (reading->load.lock() != load) continue;
      reading->late = true;
      counts_.late += reading->loads;
      const int64_t begun_ns = reading->begun_ns;
      if (begun_ns == 0) continue;
      NoQuickerThan(*reading, SecondsSince(begun_ns));
    }
  }
  return load->ended_;
}

}  // namespace deltamesh
