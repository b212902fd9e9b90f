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
// Breakpoints are where clients say, so a tenant could have the others' snapshots make room for ever more of
// them: while its breakpoints have more than `breakpoint_share` of the budget, the least of them goes before
// what is somebody else's. A breakpoint counts with the latents between it and the snapshot that was above
// it when it came.
//
// Not thread-safe. Time comes in with the calls and must not go back.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "runtime/prefix/match_blocks.h"
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
  // A session's tails and ends that it left for other paths go once it took this many elsewhere without
  // coming back: it was compacted, while agents that share its name come back in turns.
  int64_t left_kept = 16;
  absl::Duration reuse_decay = absl::Minutes(30);
  // Probability of a visit of a fresh snapshot, by kind, before the traffic has shown it; only ratios matter.
  double reuse[kSnapshotKinds] = {0.05, 0.5, 0.9, 0.5, 1.0};
  // As many snapshots of a kind that were visited or dropped without a visit weigh as much as that; those
  // beyond `reuse_memory` of them are forgotten. 0 evidence: nothing is learned.
  double reuse_evidence = 64, reuse_memory = 1024;
  // What is left of it once the session went on beyond a tail or an end.
  double passed = 0.05;
  double breakpoint_share = 0.5;  // of bytes_max, for the breakpoints of one tenant; at least 0
};

// What a prompt finds.
struct PrefixMatch {
  LatentBlocks latents;     // that are held without a gap
  SnapshotBlocks snapshot;  // where the deepest snapshot within them stands; 0: none

  friend bool operator==(const PrefixMatch&, const PrefixMatch&) = default;
};

struct SnapshotSpec {
  int64_t blocks = 0;  // where it stands, at least 1
  SnapshotKind kind = SnapshotKind::kPromptTail;
  double reuse = 1;      // how much likelier another visit is than for its kind, above 0
  uint64_t session = 0;  // on its path it replaces older tails of the same session; 0: unnamed
  uint64_t tenant = 0;   // whose it is; 0: not known
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
  uint64_t over_share = 0;  // of them, breakpoints of a tenant that had more than its share
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
  // Where the deepest snapshot at or above `key` stands that is not of the grid; 0: none.
  int64_t LastingSnapshot(const PrefixKey& key) const;
  // True when prompts are known that go on from here.
  bool HasChildren(const PrefixKey& key) const;

  // A snapshot was used, by `tenant` (0: not known): its turn to go moves back.
  void Touch(const PrefixKey& key, absl::Time now, uint64_t tenant = 0);

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
  int64_t BreakpointBytes(uint64_t tenant) const;
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
    bool visited = false;
    double reuse = 1;
    absl::Time used;
    uint64_t session = 0;
    uint64_t turn = 0;  // of the session, when it was used last
    uint64_t id = 0;
    double order = 0;  // its place in order_
    uint64_t tenant = 0;
    int64_t charged = 0;  // bytes, to its tenant's breakpoints; 0: it is none of them
  };
  // What became of the snapshots of a kind.
  struct Outcomes {
    double visited = 0, ended = 0;  // of `ended`, those that were visited; older ones fade
    double ordered_by = 0;          // the probability that the order was made with
  };
  struct Session {
    uint64_t turn = 0;        // tails and ends it took so far
    std::vector<Index> held;  // of them, those that are there; some may be junctions by now
  };

  // The breakpoints of one whose name is known.
  struct Tenant {
    int64_t bytes = 0;
    std::set<std::pair<double, Index>> order;  // as in order_
  };

  Index NodeOf(const PrefixKey& key) const;
  Index Deepest(std::span<const PrefixKey> path) const;
  Index SnapshotAt(Index node) const;
  int64_t BlocksOf(Index snapshot) const {
    return nodes_[static_cast<size_t>(snapshots_[static_cast<size_t>(snapshot)].node)].blocks;
  }
  Index AddNode(const PrefixKey& key, Index parent, uint64_t id);
  void DropNode(Index node);
  void AddSnapshot(Index node, uint64_t id, const SnapshotSpec& spec, absl::Time now);
  void DropSnapshot(Index snapshot, bool evicted);
  SnapshotView ViewOf(const Snapshot& s) const;
  void Renew(Index snapshot, const SnapshotSpec& spec, absl::Time now);
  // It came from a store, which knows no tenants: it is the first one's who uses it.
  void Own(Index snapshot, uint64_t tenant);
  void Supersede(Index newest);
  void TakeTurn(Index newest);
  void Replace(Index old);
  void DropBeyond(const std::vector<Index>& newest_first, int64_t kept);
  Index SnapshotAbove(Index node) const;
  void CountOutcome(const Snapshot& s);
  double Probability(SnapshotKind kind) const;
  void OrderAll();
  double Order(const Snapshot& s) const;
  void Reorder(Index snapshot);
  // Puts it where its order says, and takes it away.
  void Enqueue(Index snapshot);
  void Dequeue(Index snapshot);
  // Lets its tenant's breakpoints have it, if it is one, or no more.
  void Charge(Index snapshot);
  void Discharge(Index snapshot);
  // Who has more than its share when `gone` are not counted; of several the one with most.
  std::optional<uint64_t> MostOverShare(std::span<const Index> gone) const;
  // What goes in place of `next`, which is somebody else's, after `gone`; kNone: nothing.
  Index OverShare(Index next, Index protect, std::span<const Index> gone) const;
  bool EvictOneBut(Index protect);

  const PrefixTreeOptions options_;
  absl::flat_hash_map<PrefixKey, Index> by_key_;
  std::vector<Node> nodes_;
  std::vector<Index> free_nodes_;
  std::vector<Snapshot> snapshots_;
  std::vector<Index> free_snapshots_;
  absl::flat_hash_map<uint64_t, Session> sessions_;  // named ones that have tails or ends here
  std::set<std::pair<double, Index>> order_;
  absl::flat_hash_map<uint64_t, Tenant> tenants_;           // those that have breakpoints
  std::set<std::pair<int64_t, uint64_t>> tenants_by_size_;  // bytes, tenant
  std::array<Outcomes, kSnapshotKinds> outcomes_;
  std::vector<PrefixChange> changes_;
  PrefixTreeStats stats_;
};

}  // namespace deltamesh
