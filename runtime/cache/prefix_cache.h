// The prefixes of one worker: latent blocks shared with running sequences, snapshots in memory of their
// own, and the tree that says which of them stay.
//
// A snapshot is S and the conv tails of a slab at a block boundary (the open tile is empty there). It is
// written once, before it can be found, and never changed; restoring copies it into a fresh slab. Both it
// and the latents are counted handles, so what is being restored or sent stays in memory whatever is
// dropped here. Latent blocks come from the engine's pool: when that runs dry, something is dropped here.
//
// Not thread-safe: belongs to the thread that owns the engine and takes from its pools.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/prefix/prefix_tree.h"
#include "runtime/prefix/snapshot_planner.h"

namespace deltamesh {

struct PrefixCacheOptions {
  int64_t bytes_max = 0;  // snapshots, and latents that are held here; 0: no cache
  int64_t tails_kept = 2;
  double breakpoint_share = 0.5;  // of bytes_max, for one tenant's; see PrefixTreeOptions
  SnapshotPlanOptions plan;
  GridLearning learning = {};
};

struct PrefixCacheStats {
  uint64_t lookups = 0, hits = 0;
  uint64_t tokens_looked_up = 0;  // of whole blocks
  uint64_t tokens_latent = 0;     // of them with latents here
  uint64_t tokens_restored = 0;   // of them restored from a snapshot
  uint64_t snapshots_taken = 0;
  uint64_t snapshots_refused = 0;  // no room for them
};

// A snapshot that nobody can find yet.
struct StagedSnapshot {
  int64_t blocks = 0;
  SlotRef content;                         // [kda layer][S | conv]
  std::vector<SlotRef> latents;            // [blocks]
  std::shared_ptr<const int> speculative;  // held by those that may never be published
};

class PrefixCache {
 public:
  // `pools` are the engine's. RESOURCE_EXHAUSTED when the snapshots' memory cannot be reserved.
  static absl::StatusOr<std::unique_ptr<PrefixCache>> Create(const PrefixCacheOptions& options,
                                                             const StatePools& pools);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  PrefixMatch Find(std::span<const PrefixKey> path) const { return tree_.Find(path); }
  // The state at the deepest snapshot along `path`; null when there is none. Counts as a visit of `tenant`
  // (PrefixChain::tenant; 0: not known). RESOURCE_EXHAUSTED when no slab is free.
  absl::StatusOr<std::unique_ptr<SequenceState>> Restore(std::span<const PrefixKey> path,
                                                         absl::Time now, uint64_t tenant = 0);
  // Handles of the leading blocks whose latents are here, with or without a snapshot.
  std::vector<SlotRef> Latents(std::span<const PrefixKey> path) const;
  // Once for each prompt: what it finds is learned from.
  std::vector<CutPoint> Plan(std::span<const PrefixKey> path, const PrefixMatch& match,
                             const CutHints& hints);

  // Copies what a snapshot holds of `state`, which stands at a block boundary above 0. RESOURCE_EXHAUSTED
  // when there is no room, whatever is dropped.
  absl::StatusOr<StagedSnapshot> Stage(const SequenceState& state);
  // The same for one that may never be published: at most a quarter of the room goes to such.
  absl::StatusOr<StagedSnapshot> StageSpeculative(const SequenceState& state);
  // Makes it findable. spec.blocks is the snapshot's. False when it cannot fit.
  bool Publish(std::span<const PrefixKey> path, StagedSnapshot staged, const SnapshotSpec& spec,
               absl::Time now);
  // Stage and Publish, without a copy when the snapshot is there already.
  bool Keep(std::span<const PrefixKey> path, const SequenceState& state, SnapshotSpec spec,
            absl::Time now);

  // The snapshot at the end of `path`, which must be there, and its latents: counted, so that they stay while
  // they are written elsewhere, whatever is dropped here.
  StagedSnapshot Hold(std::span<const PrefixKey> path) const;
  // Room for a snapshot that comes from elsewhere: its content and those latents that are not here are to be
  // filled before it is published. At most a quarter of the snapshots' room goes to such.
  absl::StatusOr<StagedSnapshot> Reserve(std::span<const PrefixKey> path);
  // Drops the snapshot at the end of `path`, if there is one, and those above it, as long as they are tails
  // and ends of turns that nothing else goes on from: what prompts share stays.
  void Forget(std::span<const PrefixKey> path);

  // Latent blocks that nobody but this cache holds.
  int64_t ReclaimableBlocks() const;
  // Drops something so that latent blocks may become free; false when nothing is left.
  bool GiveBack();
  void Clear();

  // Since the last call: what routers are told.
  std::vector<PrefixChange> TakeChanges();
  const PrefixTree& tree() const { return tree_; }
  const SnapshotPlanner& planner() const { return planner_; }
  const PrefixCacheStats& stats() const { return stats_; }
  const StatePools& pools() const { return pools_; }

 private:
  PrefixCache(const PrefixCacheOptions& options, const StatePools& pools,
              std::shared_ptr<FixedPool> snapshots);
  absl::StatusOr<SlotRef> TakeSnapshot();
  // Lets handles follow the tree's changes; `staged` is what may have been added.
  void Follow(const StagedSnapshot* staged);

  const PrefixCacheOptions options_;
  const StatePools pools_;
  const std::shared_ptr<FixedPool> snapshots_;
  PrefixTree tree_;
  SnapshotPlanner planner_;
  absl::flat_hash_map<uint64_t, SlotRef> held_latents_, held_snapshots_;  // by slot
  std::vector<PrefixChange> untold_;
  const std::shared_ptr<const int> speculative_ = std::make_shared<const int>(0);
  const std::shared_ptr<const int> arriving_ = std::make_shared<const int>(0);
  PrefixCacheStats stats_;
};

}  // namespace deltamesh
