// Which snapshots one tier holds, how their files hang together, what may go next. Knows keys and sizes; the
// bytes are elsewhere.
//
// A state can be used when its file and all parents of it are there ("complete"); only such ones are found,
// and only of such ones changes are told. A file without its parent (damaged and removed) waits for the
// parent to be written again, and is the first to go.
//
// Eviction takes files without children only, the least of
//     ln((blocks - from) * reuse(kind) / bytes) + last use / reuse_decay
// as PrefixTree does.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/container/node_hash_map.h"
#include "absl/time/time.h"
#include "runtime/prefix/prefix_tree.h"
#include "runtime/store/state_file.h"
#include "runtime/store/store_types.h"

namespace deltamesh {

struct StoredState {
  PrefixKey key, parent;  // parent: of no meaning when from == 0
  int64_t blocks = 0, from = 0;
  SnapshotKind kind{};
  int64_t bytes = 0;
  absl::Time used;
  uint64_t version = 0;         // of the tier's, to know a file that was written anew
  std::vector<PrefixKey> keys;  // of blocks from + 1 .. blocks; empty: only the last one is known

  static StoredState Of(const StateHeader& header, absl::Time used, uint64_t version);
};

// One file to read for a state, and which of its blocks.
struct StoredPart {
  PrefixKey file;
  int64_t begin = 0, end = 0;  // blocks [begin, end)
};

// Told in the order in which it holds: parents before children when they come, after them when they go.
struct StoreChange {
  enum What : uint8_t { kBlockAdded, kBlockDropped, kSnapshotAdded, kSnapshotDropped };
  What what;
  PrefixKey key;

  friend bool operator==(const StoreChange&, const StoreChange&) = default;
};

class StoreIndex {
 public:
  // Without `tells` nobody takes the changes, and none are kept.
  explicit StoreIndex(const PrefixTreeOptions& worth = {}, bool tells = true)
      : worth_(worth), tells_(tells) {}

  // Replaces what was known of the key, unless that is complete: then it is kept, and false returned.
  bool Add(StoredState state);
  bool Remove(const PrefixKey& key);
  void Touch(const PrefixKey& key, absl::Time used);

  const StoredState* Find(const PrefixKey& key) const;
  bool Complete(const PrefixKey& key) const;
  // Blocks of the deepest complete state along the path; 0: none.
  int64_t Deepest(std::span<const PrefixKey> path) const;
  // The same with what reading it takes.
  StoreMatch Match(std::span<const PrefixKey> path) const;
  // The files of a complete state, its own first; together they cover [0, blocks).
  std::vector<StoredPart> Chain(const PrefixKey& key) const;
  // How many leading blocks of the path have stored latents, and which file has the last of them.
  struct Cover {
    int64_t blocks = 0;
    PrefixKey file;
  };
  Cover Covered(std::span<const PrefixKey> path) const;

  // The next to go but for `keep`; nothing when all others have children.
  std::optional<PrefixKey> Least(std::span<const PrefixKey> keep) const;
  // What Least goes by; files that cannot be used have -infinity.
  double Worth(const PrefixKey& key) const;
  bool HasChildren(const PrefixKey& key) const;
  // Files without children, the next to go first.
  std::vector<PrefixKey> Leaves(size_t most) const;

  int64_t bytes() const { return bytes_; }
  int64_t size() const { return static_cast<int64_t>(states_.size()); }
  std::vector<StoreChange> TakeChanges() { return std::exchange(changes_, {}); }
  // All that can be found, in an order that TakeChanges could have.
  std::vector<StoreChange> Everything() const;
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const auto& [key, entry] : states_) visit(entry.state);
  }

 private:
  struct Entry {
    StoredState state;
    bool complete = false;
    double order = 0;  // its place in order_
    bool queued = false;
  };
  using Keys = absl::InlinedVector<PrefixKey, 1>;

  bool CanComplete(const StoredState& state) const;
  void CompleteFrom(const PrefixKey& key);
  void IncompleteFrom(const PrefixKey& key);
  double OrderOf(const Entry& entry) const;
  // Lets order_ follow: in it is what has no children.
  void Requeue(const PrefixKey& key);
  static std::span<const PrefixKey> OwnKeys(const StoredState& state);

  void Tell(StoreChange::What what, const PrefixKey& key) {
    if (tells_) changes_.push_back({what, key});
  }

  const PrefixTreeOptions worth_;
  const bool tells_;
  absl::node_hash_map<PrefixKey, Entry> states_;
  absl::flat_hash_map<PrefixKey, Keys> children_;  // by parent, whether that is there or not
  absl::flat_hash_map<PrefixKey, Keys> owners_;    // complete files that hold a block's latents
  std::set<std::pair<double, PrefixKey>> order_;
  int64_t bytes_ = 0;
  std::vector<StoreChange> changes_;
};

}  // namespace deltamesh
