// Which worker holds which prefix: for every block's key, who has its latents, who has a snapshot there,
// whose snapshot lies on disk, and who finds a state in an object store. Fed by the workers' own words
// (prefix_feed.h), asked once per request.
//
// Three flat tables (key_table.h): 16 bytes for a block's latents, 24 for a snapshot, 16 for a state in an
// object store, each at least half full but for small ones; no tree, nothing to merge. Snapshots and states
// are few, so their tables are small enough to be asked about every block of a prompt. Latents are many, but
// a worker's have no gaps - it adds from the root and drops from the leaf - so where they end is found by
// halving. An entry dies with its last bit, so memory follows what workers hold. Keys are the 64-bit index of
// a PrefixKey: enough to choose a worker, which looks at the whole key itself; a wrong guess costs time,
// never an answer.
//
// A state in an object store brings its latents along: it needs none at the worker, and tells of none there.
//
// Workers beyond 64 live in further groups, each an index of its own (WorkerSlot knows which).
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/prefix/match_blocks.h"

namespace deltamesh {

// A worker's place: group * 64 + bit.
using WorkerSlot = int32_t;

// What one worker can do for a prompt; as PrefixMatch, as the router knows it.
struct IndexMatch {
  WorkerSlot worker = -1;
  LatentBlocks latents;
  SnapshotBlocks snapshot;  // the deepest one that it holds itself, in memory or on disk
  SnapshotBlocks warm;      // the deepest one in memory: at most `snapshot`
  SnapshotBlocks object;    // the deepest one that it finds in its object store, with all latents

  // The deepest one of its own must be read from disk first.
  bool cold() const { return warm < snapshot; }
  // What it can go on from, read first or not.
  SnapshotBlocks reachable() const { return std::max(snapshot, object); }
  friend bool operator==(const IndexMatch&, const IndexMatch&) = default;
};

struct IndexChange {
  enum What : uint8_t {
    kLatentsAdded = 0,
    kLatentsDropped = 1,
    kSnapshotAdded = 2,  // in memory
    kSnapshotDropped = 3,
    kSnapshotCold = 4,  // on disk only
    kObjectAdded = 5,   // a whole state in the object store
    kObjectDropped = 6,
  };
  What what;
  uint64_t key;
};

struct PrefixIndexOptions {
  int64_t entries_max = int64_t{16} << 20;  // blocks of a group; beyond it nothing new is learned
};

class PrefixIndex {
 public:
  explicit PrefixIndex(const PrefixIndexOptions& options = {});
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // A free place. Nothing is credited to it until Trust.
  WorkerSlot AddWorker();
  // Forgets all about it. The place is given to another worker once Sweep has passed over it.
  void RemoveWorker(WorkerSlot worker);
  // All that it holds is known now.
  void Trust(WorkerSlot worker);

  // In order. What finds no room is dropped and counted; what is not there is not dropped twice.
  void Apply(WorkerSlot worker, std::span<const IndexChange> changes);

  // What every trusted worker has of the prompt whose first i + 1 blocks are named keys[i]; workers with
  // neither its first block nor a state in an object store are left out. In order of slots.
  std::vector<IndexMatch> Find(std::span<const uint64_t> keys) const;

  // Does a little of the work that RemoveWorker left; false when none is left. Call often.
  bool Sweep();

  int64_t entries() const;  // blocks with latents
  int64_t snapshots() const;
  int64_t objects() const;  // states in object stores
  int64_t bytes() const;
  uint64_t dropped() const { return dropped_; }  // facts that found no room

 private:
  class Group;

  Group& GroupOf(WorkerSlot worker) const { return *groups_[static_cast<size_t>(worker) / 64]; }

  const PrefixIndexOptions options_;
  std::vector<std::unique_ptr<Group>> groups_;
  size_t sweep_at_ = 0;
  uint64_t dropped_ = 0;
};

}  // namespace deltamesh
