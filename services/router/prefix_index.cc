#include "services/router/prefix_index.h"

#include <algorithm>
#include <utility>

#include "services/router/key_table.h"

namespace deltamesh {
namespace {

struct Holders {
  uint64_t workers;  // a bit for each of the group

  bool empty() const { return workers == 0; }
};
struct SnapshotHolders {
  uint64_t workers;
  uint64_t cold;  // of them

  bool empty() const { return workers == 0; }
};
static_assert(sizeof(KeyTable<Holders>::Entry) == 16);
static_assert(sizeof(KeyTable<SnapshotHolders>::Entry) == 24);

// Says for sure that tables of few keys lack a key, for most that they lack: a bit per key in a field small
// enough for a near cache. Dropped keys keep their bit until the field is made anew.
class KeyFilter {
 public:
  bool MayHold(uint64_t key) const {
    const uint64_t bit = BitOf(key);
    return (bits_[bit / 64] >> (bit % 64) & 1) != 0;
  }
  int64_t bytes() const { return static_cast<int64_t>(bits_.size() * sizeof(uint64_t)); }
  template <typename... Tables>
  void Add(uint64_t key, const Tables&... tables) {
    Set(key);
    if (++added_ * kBitsPerKey > bits_.size() * 64) Renew(tables...);
  }

 private:
  static constexpr size_t kBitsPerKey = 16;

  uint64_t BitOf(uint64_t key) const { return key >> 7 & (bits_.size() * 64 - 1); }
  void Set(uint64_t key) {
    const uint64_t bit = BitOf(key);
    bits_[bit / 64] |= uint64_t{1} << (bit % 64);
  }
  template <typename... Tables>
  void Renew(const Tables&... tables) {
    added_ = static_cast<size_t>((tables.size() + ...));
    size_t words = 256;
    while (words * 64 < 2 * added_ * kBitsPerKey) words *= 2;
    bits_.assign(words, 0);
    (tables.ForEach([this](const auto& entry) { Set(entry.key); }), ...);
  }

  std::vector<uint64_t> bits_ = std::vector<uint64_t>(256);
  size_t added_ = 0;
};

constexpr size_t kAhead = 24;  // entries fetched before they are looked at

}  // namespace

// Up to 64 workers.
class PrefixIndex::Group {
 public:
  explicit Group(int64_t entries_max) : entries_max_(entries_max) {}

  // -1: full.
  int TakeBit() {
    const uint64_t free = ~(given_ | stale_);
    if (free == 0) return -1;
    const int bit = std::countr_zero(free);
    given_ |= uint64_t{1} << bit;
    return bit;
  }
  // The worker's bits count for nothing from now on and go segment by segment.
  void Release(int bit) {
    given_ &= ~(uint64_t{1} << bit);
    trusted_ &= ~(uint64_t{1} << bit);
    stale_ |= uint64_t{1} << bit;
    sweep_left_ = KeyTable<Holders>::kSegments;
  }
  void Trust(int bit) { trusted_ |= uint64_t{1} << bit; }

  [[gnu::always_inline]] void Prefetch(const IndexChange& change) const {
    if (change.what <= IndexChange::kLatentsDropped) latents_.Prefetch(change.key);
  }
  // False: there was no room.
  bool Apply(const IndexChange& change, uint64_t bit);

  void Find(std::span<const uint64_t> keys, WorkerSlot first, std::vector<IndexMatch>* out) const;

  bool SweepOne() {
    if (sweep_left_ == 0) return false;
    const auto clear = [this](auto& facts) { facts.workers &= ~stale_; };
    latents_.ChangeSegment(--sweep_left_, clear);
    snapshots_.ChangeSegment(sweep_left_, clear);
    objects_.ChangeSegment(sweep_left_, clear);
    if (sweep_left_ == 0) stale_ = 0;
    return true;
  }

  int64_t entries() const { return latents_.size(); }
  int64_t snapshots() const { return snapshots_.size(); }
  int64_t objects() const { return objects_.size(); }
  int64_t bytes() const {
    return latents_.bytes() + snapshots_.bytes() + objects_.bytes() + filter_.bytes();
  }

 private:
  uint64_t LatentsAt(uint64_t key) const {
    const auto* entry = latents_.Find(key);
    return entry == nullptr ? 0 : entry->facts.workers & trusted_;
  }
  // Null: it is not there, and there is no room for it.
  template <typename Facts>
  auto* FindOrAdd(KeyTable<Facts>& table, uint64_t key) {
    return table.size() >= entries_max_ ? table.Find(key) : table.FindOrAdd(key);
  }
  template <typename Table>
  static void Drop(Table& table, uint64_t key, uint64_t bit);
  void EndsBetween(std::span<const uint64_t> keys, size_t low, size_t high, uint64_t at_low,
                   uint64_t at_high, std::array<IndexMatch, 64>& found) const;
  // Where the latents of the workers in `begin` end, which have the first block; the longest of them.
  int64_t FindLatents(std::span<const uint64_t> keys, uint64_t begin,
                      std::array<IndexMatch, 64>& found) const;
  // Snapshots within these, and states in object stores; the workers for which there is one of the latter.
  uint64_t FindStates(std::span<const uint64_t> keys, uint64_t begin, int64_t longest,
                      std::array<IndexMatch, 64>& found) const;

  const int64_t entries_max_;
  KeyTable<Holders> latents_;
  KeyTable<SnapshotHolders> snapshots_;
  KeyTable<Holders> objects_;
  KeyFilter filter_;      // of the keys in both
  uint64_t given_ = 0;    // places in use
  uint64_t trusted_ = 0;  // of these, those that are credited
  uint64_t stale_ = 0;    // bits that mean nothing until they are swept
  size_t sweep_left_ = 0;
};

template <typename Table>
void PrefixIndex::Group::Drop(Table& table, uint64_t key, uint64_t bit) {
  auto* entry = table.Find(key);
  if (entry == nullptr) return;
  entry->facts.workers &= ~bit;
  if (entry->facts.empty()) table.Erase(entry);
}

bool PrefixIndex::Group::Apply(const IndexChange& change, uint64_t bit) {
  switch (change.what) {
    case IndexChange::kLatentsAdded: {
      auto* entry = FindOrAdd(latents_, change.key);
      if (entry == nullptr) return false;
      entry->facts.workers |= bit;
      return true;
    }
    case IndexChange::kLatentsDropped:
      Drop(latents_, change.key, bit);
      return true;
    case IndexChange::kSnapshotAdded:
    case IndexChange::kSnapshotCold: {
      auto* entry = FindOrAdd(snapshots_, change.key);
      if (entry == nullptr) return false;
      SnapshotHolders& holders = entry->facts;
      const bool fresh = holders.empty();
      holders.workers |= bit;
      holders.cold =
          change.what == IndexChange::kSnapshotCold ? holders.cold | bit : holders.cold & ~bit;
      if (fresh) filter_.Add(change.key, snapshots_, objects_);
      return true;
    }
    case IndexChange::kSnapshotDropped:
      Drop(snapshots_, change.key, bit);
      return true;
    case IndexChange::kObjectAdded: {
      auto* entry = FindOrAdd(objects_, change.key);
      if (entry == nullptr) return false;
      const bool fresh = entry->facts.empty();
      entry->facts.workers |= bit;
      if (fresh) filter_.Add(change.key, snapshots_, objects_);
      return true;
    }
    case IndexChange::kObjectDropped:
      Drop(objects_, change.key, bit);
      return true;
  }
  return true;
}

// Where the latents of workers end that have keys[low - 1] and not keys[high - 1].
void PrefixIndex::Group::EndsBetween(std::span<const uint64_t> keys, size_t low, size_t high,
                                     uint64_t at_low, uint64_t at_high,
                                     std::array<IndexMatch, 64>& found) const {
  uint64_t ending = at_low & ~at_high;
  if (ending == 0) return;
  if (low + 1 == high) {
    for (; ending != 0; ending &= ending - 1) {
      found[static_cast<size_t>(std::countr_zero(ending))].latents =
          LatentBlocks(static_cast<int64_t>(low));
    }
    return;
  }
  const size_t middle = low + (high - low) / 2;
  const uint64_t at_middle = LatentsAt(keys[middle - 1]) & at_low;
  EndsBetween(keys, low, middle, at_low, at_middle, found);
  EndsBetween(keys, middle, high, at_middle, at_high & at_middle, found);
}

int64_t PrefixIndex::Group::FindLatents(std::span<const uint64_t> keys, uint64_t begin,
                                        std::array<IndexMatch, 64>& found) const {
  const uint64_t end = LatentsAt(keys.back()) & begin;
  EndsBetween(keys, 1, keys.size(), begin, end, found);
  int64_t longest = 0;
  for (uint64_t left = begin; left != 0; left &= left - 1) {
    const int bit = std::countr_zero(left);
    IndexMatch& match = found[static_cast<size_t>(bit)];
    if ((end >> bit & 1) != 0) match.latents = LatentBlocks(static_cast<int64_t>(keys.size()));
    longest = std::max(longest, match.latents.value());
  }
  return longest;
}

uint64_t PrefixIndex::Group::FindStates(std::span<const uint64_t> keys, uint64_t begin,
                                        int64_t longest, std::array<IndexMatch, 64>& found) const {
  uint64_t with_object = 0;
  const int64_t most = objects_.size() == 0 ? longest : static_cast<int64_t>(keys.size());
  for (int64_t i = 0; i < most; ++i) {
    const uint64_t key = keys[static_cast<size_t>(i)];
    if (!filter_.MayHold(key)) continue;
    const auto* snapshot = i < longest ? snapshots_.Find(key) : nullptr;
    for (uint64_t s = snapshot == nullptr ? 0 : snapshot->facts.workers & begin; s != 0;
         s &= s - 1) {
      const int bit = std::countr_zero(s);
      IndexMatch& match = found[static_cast<size_t>(bit)];
      if (i >= match.latents.value()) continue;
      match.snapshot = SnapshotBlocks(i + 1);
      if ((snapshot->facts.cold >> bit & 1) == 0) match.warm = match.snapshot;
    }
    const auto* object = objects_.Find(key);
    const uint64_t there = object == nullptr ? 0 : object->facts.workers & trusted_;
    for (uint64_t o = there; o != 0; o &= o - 1) {
      found[static_cast<size_t>(std::countr_zero(o))].object = SnapshotBlocks(i + 1);
    }
    with_object |= there;
  }
  return with_object;
}

void PrefixIndex::Group::Find(std::span<const uint64_t> keys, WorkerSlot first,
                              std::vector<IndexMatch>* out) const {
  const uint64_t begin = LatentsAt(keys[0]);
  if (begin == 0 && objects_.size() == 0) return;
  std::array<IndexMatch, 64> found;
  const int64_t longest = begin == 0 ? 0 : FindLatents(keys, begin, found);
  const uint64_t with_object = FindStates(keys, begin, longest, found);
  for (uint64_t left = begin | with_object; left != 0; left &= left - 1) {
    const int bit = std::countr_zero(left);
    found[static_cast<size_t>(bit)].worker = first + bit;
    out->push_back(found[static_cast<size_t>(bit)]);
  }
}

PrefixIndex::PrefixIndex(const PrefixIndexOptions& options) : options_(options) {}
PrefixIndex::~PrefixIndex() = default;

WorkerSlot PrefixIndex::AddWorker() {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int bit = groups_[g]->TakeBit();
    if (bit >= 0) return static_cast<WorkerSlot>(g * 64) + bit;
  }
  groups_.push_back(std::make_unique<Group>(options_.entries_max));
  return static_cast<WorkerSlot>((groups_.size() - 1) * 64) + groups_.back()->TakeBit();
}

void PrefixIndex::RemoveWorker(WorkerSlot worker) { GroupOf(worker).Release(worker % 64); }

void PrefixIndex::Trust(WorkerSlot worker) { GroupOf(worker).Trust(worker % 64); }

void PrefixIndex::Apply(WorkerSlot worker, std::span<const IndexChange> changes) {
  Group& group = GroupOf(worker);
  const uint64_t bit = uint64_t{1} << (worker % 64);
  for (size_t i = 0; i < std::min(changes.size(), kAhead); ++i) group.Prefetch(changes[i]);
  for (size_t i = 0; i < changes.size(); ++i) {
    if (i + kAhead < changes.size()) group.Prefetch(changes[i + kAhead]);
    dropped_ += !group.Apply(changes[i], bit);
  }
}

std::vector<IndexMatch> PrefixIndex::Find(std::span<const uint64_t> keys) const {
  std::vector<IndexMatch> out;
  if (keys.empty()) return out;
  for (size_t g = 0; g < groups_.size(); ++g) {
    groups_[g]->Find(keys, static_cast<WorkerSlot>(g * 64), &out);
  }
  return out;
}

bool PrefixIndex::Sweep() {
  for (size_t tried = 0; tried < groups_.size(); ++tried) {
    if (groups_[sweep_at_++ % groups_.size()]->SweepOne()) return true;
  }
  return false;
}

int64_t PrefixIndex::entries() const {
  int64_t entries = 0;
  for (const auto& group : groups_) entries += group->entries();
  return entries;
}

int64_t PrefixIndex::snapshots() const {
  int64_t snapshots = 0;
  for (const auto& group : groups_) snapshots += group->snapshots();
  return snapshots;
}

int64_t PrefixIndex::objects() const {
  int64_t objects = 0;
  for (const auto& group : groups_) objects += group->objects();
  return objects;
}

int64_t PrefixIndex::bytes() const {
  int64_t bytes = 0;
  for (const auto& group : groups_) bytes += group->bytes();
  return bytes;
}

}  // namespace deltamesh
