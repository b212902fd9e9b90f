// Which prefixes are worth keeping: a tree of 64-token blocks, snapshots on some of its nodes, one byte
// budget for both, and the order in which they go.
//
// Knows keys and sizes, not memory: payloads are numbers of the caller's (`block id`, `snapshot id`), and
// every change is told through TakeChanges, which is also what a router is told. So a worker and a
// simulation run the same decisions.
//
// A hit needs latents up to a position *and* a snapshot at it, so these are two facts here (PrefixMatch),
// and the tree never holds one that the other half makes useless. Invariants, checked by Check():
//   * every node's parent is there: latents are contiguous from the root;
//   * every leaf has a snapshot: no latents beyond the last snapshot, which nobody could use;
//   * bytes() <= bytes_max.
//
// Eviction takes the snapshot with the least
//     (tokens to compute again * probability of another visit) / bytes that its going frees,
// where the probability falls by e each `reuse_decay` without a visit. Its logarithm is
//     ln(tokens * reuse / bytes) + last use / reuse_decay    (+ the same for all),
// an order that does not change while time passes, so a sorted set holds it. It is renewed when a snapshot
// is used, passed or about to go; between that, what changes above it may leave it where it was.
//
// Not thread-safe. Time comes in with the calls and must not go back.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "runtime/prefix/prefix_key.h"

namespace deltamesh {

// Why a snapshot was taken; decides how likely another visit is, and what replaces it.
enum class SnapshotKind : uint8_t {
  kGrid,        // within a long prompt, for documents
  kPromptTail,  // the end of a prompt; the session's newest ones replace older ones
  kAnswerEnd,   // the end of an answer; the newest one replaces older ones
  kJunction,    // where two prompts parted
  kBreakpoint,  // the end of tools and system text, or where the client said
};
inline constexpr int kSnapshotKinds = 5;
const char* SnapshotKindName(SnapshotKind kind);

struct PrefixTreeOptions {
  int64_t bytes_max = 0;
  int64_t block_bytes = 0;
  int64_t snapshot_bytes = 0;
  int64_t tails_kept = 2;  // of a session along one path, at least 1
  int64_t ends_kept = 1;   // the same for ends of answers
  absl::Duration reuse_decay = absl::Minutes(30);
  // Probability of another visit of a fresh snapshot, by kind; only ratios matter.
  double reuse[kSnapshotKinds] = {0.05, 0.5, 0.9, 0.5, 1.0};
  // What is left of it once the session went on beyond a tail or an end.
  double passed = 0.05;
};

// What a prompt finds, in blocks from its beginning.
struct PrefixMatch {
  int64_t latents = 0;   // blocks whose latents are held without a gap
  int64_t snapshot = 0;  // where the deepest snapshot within them stands; 0: none

  friend bool operator==(const PrefixMatch&, const PrefixMatch&) = default;
};

struct SnapshotSpec {
  int64_t blocks = 0;  // where it stands, at least 1
  SnapshotKind kind = SnapshotKind::kPromptTail;
  double reuse = 1;      // how much likelier another visit is than for its kind, above 0
  uint64_t session = 0;  // on its path it replaces older tails of the same session; 0: unnamed
};

struct PrefixChange {
  enum What : uint8_t { kBlockAdded, kBlockDropped, kSnapshotAdded, kSnapshotDropped };
  What what;
  PrefixKey key;
  int64_t blocks;        // the key's depth
  uint64_t id;           // the payload
  bool evicted = false;  // a snapshot that made room, and was not replaced or asked to go

  friend bool operator==(const PrefixChange&, const PrefixChange&) = default;
};

struct PrefixTreeStats {
  int64_t blocks = 0, snapshots = 0;
  uint64_t superseded = 0;  // snapshots replaced by newer ones of their session
  uint64_t evicted = 0;     // snapshots that made room
};

class PrefixTree {
 public:
  explicit PrefixTree(const PrefixTreeOptions& options);

  // path[i] names the first i + 1 blocks of a prompt.
  PrefixMatch Find(std::span<const PrefixKey> path) const;
  // The payloads of the first `count` blocks, and of the snapshot at `count`; both must be there.
  std::vector<uint64_t> BlockIds(std::span<const PrefixKey> path, int64_t count) const;
  uint64_t SnapshotId(const PrefixKey& key) const;
  bool HasSnapshot(const PrefixKey& key) const;
  // True when prompts are known that go on from here.
  bool HasChildren(const PrefixKey& key) const;

  // A snapshot was used: its turn to go moves back.
  void Touch(const PrefixKey& key, absl::Time now);

  // Takes a snapshot at path[spec.blocks - 1] and the latents up to it; block_ids[i] is the payload of
  // block i. What the tree has already is kept as it is (the given payloads are not taken; no change
  // tells of them). False when it can never fit. Evicts what has to go: neither this snapshot nor the
  // latents of its path, though perhaps snapshots above it.
  bool Insert(std::span<const PrefixKey> path, std::span<const uint64_t> block_ids,
              uint64_t snapshot_id, const SnapshotSpec& spec, absl::Time now);

  // Drops one snapshot and the latents only it needed; false when the tree is empty.
  bool EvictOne();
  // Drops this snapshot, which must be there, and the latents only it needed.
  void Drop(const PrefixKey& key);
  void Clear();

  // Changes since the last call, in order.
  std::vector<PrefixChange> TakeChanges() { return std::exchange(changes_, {}); }

  int64_t bytes() const;
  const PrefixTreeOptions& options() const { return options_; }
  const PrefixTreeStats& stats() const { return stats_; }
  // Every node with its depth, in no order: what a router is told when it starts from nothing.
  void ForEach(const std::function<void(const PrefixKey&, int64_t blocks, bool snapshot)>& f) const;
  // The keys of a node's blocks, the first block's first; the node must be there.
  std::vector<PrefixKey> PathTo(const PrefixKey& key) const;
  struct SnapshotView {
    PrefixKey key;
    int64_t blocks;
    SnapshotKind kind;
    absl::Time used;
    bool passed;  // a tail or an end beyond which its session went on
  };
  SnapshotView View(const PrefixKey& key) const;
  void ForEachSnapshot(const std::function<void(const SnapshotView&)>& f) const;
  // Those that EvictOne would take next, about in that order.
  std::vector<PrefixKey> NextToGo(size_t most) const;
  // The first invariant that does not hold; empty when all do. Slow.
  std::string Check() const;

 private:
  using Index = int32_t;
  static constexpr Index kNone = -1;

  struct Node {
    PrefixKey key;
    Index parent = kNone;
    int32_t blocks = 0;  // depth; 0: free
    int32_t children = 0;
    Index snapshot = kNone;
    uint64_t id = 0;
  };
  struct Snapshot {
    Index node = kNone;  // kNone: free
    SnapshotKind kind{};
    double reuse = 1;
    absl::Time used;
    uint64_t session = 0;
    uint64_t id = 0;
    double order = 0;  // its place in order_
  };

  Index NodeOf(const PrefixKey& key) const;
  Index AddNode(const PrefixKey& key, Index parent, uint64_t id);
  void DropNode(Index node);
  void AddSnapshot(Index node, uint64_t id, const SnapshotSpec& spec, absl::Time now);
  void DropSnapshot(Index snapshot, bool evicted);
  SnapshotView ViewOf(const Snapshot& s) const;
  void Renew(Index snapshot, const SnapshotSpec& spec, absl::Time now);
  void Supersede(Index newest);
  void DropBeyond(const std::vector<Index>& newest_first, int64_t kept);
  Index SnapshotAbove(Index node) const;
  double Order(const Snapshot& s) const;
  void Reorder(Index snapshot);
  bool EvictOneBut(Index protect);

  const PrefixTreeOptions options_;
  absl::flat_hash_map<PrefixKey, Index> by_key_;
  std::vector<Node> nodes_;
  std::vector<Index> free_nodes_;
  std::vector<Snapshot> snapshots_;
  std::vector<Index> free_snapshots_;
  std::set<std::pair<double, Index>> order_;
  std::vector<PrefixChange> changes_;
  PrefixTreeStats stats_;
};

}  // namespace deltamesh
