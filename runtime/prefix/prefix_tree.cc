#include "runtime/prefix/prefix_tree.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr double kLeastReuse = 0.002;
constexpr double kFar = 1.5;  // times, up or down

bool IsTailOrEnd(SnapshotKind kind) {
  return kind == SnapshotKind::kPromptTail || kind == SnapshotKind::kAnswerEnd;
}

}  // namespace

const char* SnapshotKindName(SnapshotKind kind) {
  switch (kind) {
    case SnapshotKind::kGrid:
      return "grid";
    case SnapshotKind::kPromptTail:
      return "prompt_tail";
    case SnapshotKind::kAnswerEnd:
      return "answer_end";
    case SnapshotKind::kJunction:
      return "junction";
    case SnapshotKind::kBreakpoint:
      return "breakpoint";
  }
  return "unknown";
}

PrefixTree::PrefixTree(const PrefixTreeOptions& options) : options_(options) {
  CHECK(options.bytes_max >= 0 && options.block_bytes >= 0 && options.snapshot_bytes >= 0,
        "bytes_max %d, block %d, snapshot %d", options.bytes_max, options.block_bytes,
        options.snapshot_bytes);
  CHECK(options.tails_kept >= 1 && options.ends_kept >= 1 && options.left_kept >= 1 &&
            options.passed > 0,
        "kept %d, %d and %d", options.tails_kept, options.ends_kept, options.left_kept);
  CHECK(options.reuse_decay > absl::ZeroDuration() && options.breakpoint_share >= 0);
}

// ---- what is there -------------------------------------------------------------------------------

PrefixTree::Index PrefixTree::NodeOf(const PrefixKey& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? kNone : found->second;
}

// The deepest node of the path. A key names everything before it, so with a key all earlier ones are there
// and halving finds the last.
PrefixTree::Index PrefixTree::Deepest(std::span<const PrefixKey> path) const {
  size_t here = 0, gone = path.size() + 1;  // counts of blocks
  Index deepest = kNone;
  while (here + 1 < gone) {
    const size_t middle = here + (gone - here) / 2;
    const Index node = NodeOf(path[middle - 1]);
    if (node == kNone) {
      gone = middle;
    } else {
      here = middle;
      deepest = node;
    }
  }
  return deepest;
}

// The nearest snapshot at a node or above it.
PrefixTree::Index PrefixTree::SnapshotAt(Index node) const {
  if (node == kNone) return kNone;
  const Index snapshot = nodes_[static_cast<size_t>(node)].snapshot;
  return snapshot != kNone ? snapshot : SnapshotAbove(node);
}

PrefixMatch PrefixTree::Find(std::span<const PrefixKey> path) const {
  const Index node = Deepest(path);
  if (node == kNone) return {};
  const Index snapshot = SnapshotAt(node);
  return {.latents = LatentBlocks(nodes_[static_cast<size_t>(node)].blocks),
          .snapshot = SnapshotBlocks(snapshot == kNone ? 0 : BlocksOf(snapshot))};
}

int64_t PrefixTree::LastingSnapshot(const PrefixKey& key) const {
  Index snapshot = SnapshotAt(NodeOf(key));
  while (snapshot != kNone &&
         snapshots_[static_cast<size_t>(snapshot)].kind == SnapshotKind::kGrid) {
    snapshot = SnapshotAbove(snapshots_[static_cast<size_t>(snapshot)].node);
  }
  return snapshot == kNone ? 0 : BlocksOf(snapshot);
}

std::vector<uint64_t> PrefixTree::BlockIds(std::span<const PrefixKey> path, int64_t count) const {
  std::vector<uint64_t> ids(static_cast<size_t>(count));
  if (count == 0) return ids;
  Index node = NodeOf(path[static_cast<size_t>(count - 1)]);
  CHECK(node != kNone, "block %d is not here", count);
  for (size_t i = ids.size(); i-- > 0; node = nodes_[static_cast<size_t>(node)].parent) {
    ids[i] = nodes_[static_cast<size_t>(node)].id;
  }
  return ids;
}

bool PrefixTree::HasSnapshot(const PrefixKey& key) const {
  const Index node = NodeOf(key);
  return node != kNone && nodes_[static_cast<size_t>(node)].snapshot != kNone;
}

uint64_t PrefixTree::SnapshotId(const PrefixKey& key) const {
  CHECK(HasSnapshot(key), "no snapshot at %s", key.Hex());
  const Index snapshot = nodes_[static_cast<size_t>(NodeOf(key))].snapshot;
  return snapshots_[static_cast<size_t>(snapshot)].id;
}

bool PrefixTree::HasChildren(const PrefixKey& key) const {
  const Index node = NodeOf(key);
  return node != kNone && nodes_[static_cast<size_t>(node)].children > 0;
}

int64_t PrefixTree::bytes() const {
  return stats_.blocks * options_.block_bytes + stats_.snapshots * options_.snapshot_bytes;
}

void PrefixTree::ForEach(const std::function<void(const PrefixKey&, int64_t, bool)>& f) const {
  for (const Node& node : nodes_) {
    if (node.blocks > 0) f(node.key, node.blocks, node.snapshot != kNone);
  }
}

std::vector<PrefixKey> PrefixTree::PathTo(const PrefixKey& key) const {
  Index at = NodeOf(key);
  CHECK(at != kNone, "no node at %s", key.Hex());
  std::vector<PrefixKey> path(static_cast<size_t>(nodes_[static_cast<size_t>(at)].blocks));
  for (size_t i = path.size(); i-- > 0; at = nodes_[static_cast<size_t>(at)].parent) {
    path[i] = nodes_[static_cast<size_t>(at)].key;
  }
  return path;
}

PrefixTree::SnapshotView PrefixTree::ViewOf(const Snapshot& s) const {
  const Node& node = nodes_[static_cast<size_t>(s.node)];
  return {.key = node.key,
          .blocks = node.blocks,
          .kind = s.kind,
          .used = s.used,
          .passed = IsTailOrEnd(s.kind) && node.children == 1};
}

PrefixTree::SnapshotView PrefixTree::View(const PrefixKey& key) const {
  CHECK(HasSnapshot(key), "no snapshot at %s", key.Hex());
  return ViewOf(snapshots_[static_cast<size_t>(nodes_[static_cast<size_t>(NodeOf(key))].snapshot)]);
}

void PrefixTree::ForEachSnapshot(const std::function<void(const SnapshotView&)>& f) const {
  for (const Snapshot& s : snapshots_) {
    if (s.node != kNone) f(ViewOf(s));
  }
}

std::vector<PrefixKey> PrefixTree::NextToGo(size_t most) const {
  std::vector<Index> gone;
  for (auto i = order_.begin(); i != order_.end() && gone.size() < most;) {
    if (std::find(gone.begin(), gone.end(), i->second) != gone.end()) {
      ++i;
      continue;
    }
    const Index instead = OverShare(i->second, kNone, gone);
    gone.push_back(instead != kNone ? instead : i->second);
  }
  std::vector<PrefixKey> next;
  for (const Index index : gone) {
    const Index node = snapshots_[static_cast<size_t>(index)].node;
    next.push_back(nodes_[static_cast<size_t>(node)].key);
  }
  return next;
}

// ---- nodes and snapshots -------------------------------------------------------------------------

PrefixTree::Index PrefixTree::AddNode(const PrefixKey& key, Index parent, uint64_t id) {
  Index index;
  if (free_nodes_.empty()) {
    index = static_cast<Index>(nodes_.size());
    nodes_.emplace_back();
  } else {
    index = free_nodes_.back();
    free_nodes_.pop_back();
  }
  Node& node = nodes_[static_cast<size_t>(index)];
  node = {.key = key, .parent = parent, .blocks = 1, .id = id};
  if (parent != kNone) {
    Node& above = nodes_[static_cast<size_t>(parent)];
    ++above.children;
    node.blocks = above.blocks + 1;
  }
  by_key_.emplace(key, index);
  ++stats_.blocks;
  changes_.push_back({PrefixChange::kBlockAdded, key, node.blocks, id});
  if (parent != kNone) {
    const Index above = nodes_[static_cast<size_t>(parent)].snapshot;
    if (above != kNone) Reorder(above);
  }
  return index;
}

void PrefixTree::DropNode(Index index) {
  Node& node = nodes_[static_cast<size_t>(index)];
  CHECK(node.children == 0 && node.snapshot == kNone, "node %d is in use", index);
  changes_.push_back({PrefixChange::kBlockDropped, node.key, node.blocks, node.id});
  if (node.parent != kNone) --nodes_[static_cast<size_t>(node.parent)].children;
  by_key_.erase(node.key);
  node.blocks = 0;
  free_nodes_.push_back(index);
  --stats_.blocks;
}

void PrefixTree::AddSnapshot(Index node, uint64_t id, const SnapshotSpec& spec, absl::Time now) {
  Index index;
  if (free_snapshots_.empty()) {
    index = static_cast<Index>(snapshots_.size());
    snapshots_.emplace_back();
  } else {
    index = free_snapshots_.back();
    free_snapshots_.pop_back();
  }
  snapshots_[static_cast<size_t>(index)] = {.node = node,
                                            .kind = spec.kind,
                                            .reuse = spec.reuse,
                                            .used = now,
                                            .session = spec.session,
                                            .id = id,
                                            .tenant = spec.tenant};
  Node& at = nodes_[static_cast<size_t>(node)];
  at.snapshot = index;
  ++stats_.snapshots;
  changes_.push_back({PrefixChange::kSnapshotAdded, at.key, at.blocks, id});
  Snapshot& s = snapshots_[static_cast<size_t>(index)];
  s.order = Order(s);
  Enqueue(index);
  Charge(index);
  if (s.session != 0 && IsTailOrEnd(s.kind)) sessions_[s.session].held.push_back(index);
}

// Also drops the latents that nothing else needs, leaf first.
void PrefixTree::DropSnapshot(Index index, bool evicted) {
  Snapshot& s = snapshots_[static_cast<size_t>(index)];
  Index at = s.node;
  Node& node = nodes_[static_cast<size_t>(at)];
  changes_.push_back({PrefixChange::kSnapshotDropped, node.key, node.blocks, s.id, evicted});
  node.snapshot = kNone;
  Discharge(index);
  Dequeue(index);
  if (!s.visited) CountOutcome(s);
  s.node = kNone;
  free_snapshots_.push_back(index);
  if (const auto session = sessions_.find(s.session); session != sessions_.end()) {
    std::erase(session->second.held, index);
    if (session->second.held.empty()) sessions_.erase(session);
  }
  --stats_.snapshots;
  while (at != kNone) {
    const Node& leaf = nodes_[static_cast<size_t>(at)];
    if (leaf.children > 0 || leaf.snapshot != kNone) break;
    const Index above = leaf.parent;
    DropNode(at);
    at = above;
  }
  if (at == kNone) return;
  const Index above = nodes_[static_cast<size_t>(at)].snapshot;
  if (above != kNone) Reorder(above);
}

// The same prefix was computed again: it is at least as valuable as both say.
void PrefixTree::Renew(Index index, const SnapshotSpec& spec, absl::Time now) {
  Snapshot& s = snapshots_[static_cast<size_t>(index)];
  s.used = now;
  s.kind = std::max(s.kind, spec.kind);
  s.reuse = std::max(s.reuse, spec.reuse);
  Own(index, spec.tenant);
  Reorder(index);
}

void PrefixTree::Touch(const PrefixKey& key, absl::Time now, uint64_t tenant) {
  const Index node = NodeOf(key);
  CHECK(node != kNone && nodes_[static_cast<size_t>(node)].snapshot != kNone, "no snapshot at %s",
        key.Hex());
  const Index snapshot = nodes_[static_cast<size_t>(node)].snapshot;
  Snapshot& s = snapshots_[static_cast<size_t>(snapshot)];
  s.used = now;
  if (!std::exchange(s.visited, true)) CountOutcome(s);
  if (const auto session = sessions_.find(s.session); session != sessions_.end()) {
    s.turn = session->second.turn;
  }
  Own(snapshot, tenant);
  Reorder(snapshot);
}

bool PrefixTree::Insert(std::span<const PrefixKey> path, std::span<const uint64_t> block_ids,
                        uint64_t snapshot_id, const SnapshotSpec& spec, absl::Time now) {
  CHECK(spec.blocks >= 1 && static_cast<size_t>(spec.blocks) <= path.size() &&
            static_cast<size_t>(spec.blocks) <= block_ids.size(),
        "a snapshot at block %d of a path of %d with %d payloads", spec.blocks, path.size(),
        block_ids.size());
  CHECK(spec.reuse > 0);
  if (spec.blocks * options_.block_bytes + options_.snapshot_bytes > options_.bytes_max) {
    return false;
  }
  Index at = Deepest(path.first(static_cast<size_t>(spec.blocks)));
  for (size_t i = at == kNone ? 0 : static_cast<size_t>(nodes_[static_cast<size_t>(at)].blocks);
       i < static_cast<size_t>(spec.blocks); ++i) {
    at = AddNode(path[i], at, block_ids[i]);
  }
  if (const Index known = nodes_[static_cast<size_t>(at)].snapshot; known != kNone) {
    Renew(known, spec, now);
  } else {
    AddSnapshot(at, snapshot_id, spec, now);
  }
  Supersede(nodes_[static_cast<size_t>(at)].snapshot);
  TakeTurn(nodes_[static_cast<size_t>(at)].snapshot);
  if (bytes() > options_.bytes_max) OrderAll();
  while (bytes() > options_.bytes_max) CHECK(EvictOneBut(at), "nothing left to evict");
  return true;
}

// ---- what goes -----------------------------------------------------------------------------------

// The nearest snapshot strictly above a node.
PrefixTree::Index PrefixTree::SnapshotAbove(Index node) const {
  for (Index at = nodes_[static_cast<size_t>(node)].parent; at != kNone;
       at = nodes_[static_cast<size_t>(at)].parent) {
    const Index snapshot = nodes_[static_cast<size_t>(at)].snapshot;
    if (snapshot != kNone) return snapshot;
  }
  return kNone;
}

// Tails and ends of the session that newer ones on the same path replace. Other paths are left alone: agents
// and users may share a session's name and talk about different things.
void PrefixTree::Supersede(Index newest) {
  const uint64_t session = snapshots_[static_cast<size_t>(newest)].session;
  std::vector<Index> tails, ends;  // newest first
  for (Index i = newest; i != kNone; i = SnapshotAbove(snapshots_[static_cast<size_t>(i)].node)) {
    const Snapshot& s = snapshots_[static_cast<size_t>(i)];
    if (s.session != session) continue;
    if (s.kind == SnapshotKind::kPromptTail) tails.push_back(i);
    if (s.kind == SnapshotKind::kAnswerEnd) ends.push_back(i);
  }
  DropBeyond(tails, options_.tails_kept);
  DropBeyond(ends, options_.ends_kept);
}

// Those of the session that it has left behind.
void PrefixTree::TakeTurn(Index newest) {
  Snapshot& s = snapshots_[static_cast<size_t>(newest)];
  const auto found = sessions_.find(s.session);
  if (found == sessions_.end() || !IsTailOrEnd(s.kind)) return;
  s.turn = ++found->second.turn;
  const std::vector<Index> held = found->second.held;
  for (const Index i : held) {
    const Snapshot& old = snapshots_[static_cast<size_t>(i)];
    const bool left = s.turn - old.turn > static_cast<uint64_t>(options_.left_kept);
    if (left && IsTailOrEnd(old.kind)) Replace(i);
  }
}

void PrefixTree::DropBeyond(const std::vector<Index>& newest_first, int64_t kept) {
  for (size_t i = static_cast<size_t>(kept); i < newest_first.size(); ++i) Replace(newest_first[i]);
}

// Where prompts parted, a tail or an end stays as what it has become.
void PrefixTree::Replace(Index index) {
  Snapshot& old = snapshots_[static_cast<size_t>(index)];
  if (nodes_[static_cast<size_t>(old.node)].children > 1) {
    old.kind = SnapshotKind::kJunction;
    return Reorder(index);
  }
  ++stats_.superseded;
  DropSnapshot(index, false);
}

void PrefixTree::CountOutcome(const Snapshot& s) {
  if (options_.reuse_evidence <= 0) return;
  Outcomes& o = outcomes_[static_cast<size_t>(s.kind)];
  const double keep = 1 - 1 / options_.reuse_memory;
  o.ended = o.ended * keep + 1;
  o.visited = o.visited * keep + (s.visited ? 1 : 0);
}

double PrefixTree::Probability(SnapshotKind kind) const {
  const Outcomes& o = outcomes_[static_cast<size_t>(kind)];
  const double prior = options_.reuse[static_cast<size_t>(kind)];
  if (options_.reuse_evidence <= 0) return prior;
  return std::max(kLeastReuse, (o.visited + prior * options_.reuse_evidence) /
                                   (o.ended + options_.reuse_evidence));
}

// Once a probability has moved far from the one that the order was made with.
void PrefixTree::OrderAll() {
  bool moved = false;
  for (int kind = 0; kind < kSnapshotKinds; ++kind) {
    Outcomes& o = outcomes_[static_cast<size_t>(kind)];
    const double now = Probability(static_cast<SnapshotKind>(kind));
    const double then = o.ordered_by > 0 ? o.ordered_by : options_.reuse[static_cast<size_t>(kind)];
    moved |= now > then * kFar || now * kFar < then;
  }
  if (!moved) return;
  for (int kind = 0; kind < kSnapshotKinds; ++kind) {
    outcomes_[static_cast<size_t>(kind)].ordered_by = Probability(static_cast<SnapshotKind>(kind));
  }
  for (size_t i = 0; i < snapshots_.size(); ++i) {
    if (snapshots_[i].node != kNone) Reorder(static_cast<Index>(i));
  }
}

double PrefixTree::Order(const Snapshot& s) const {
  const Node& node = nodes_[static_cast<size_t>(s.node)];
  const Index above = SnapshotAbove(s.node);
  const int64_t start = above == kNone ? 0 : BlocksOf(above);
  int64_t freed_blocks = 0;  // latents that would go with it
  if (node.children == 0) {
    Index at = s.node;
    do {
      ++freed_blocks;
      at = nodes_[static_cast<size_t>(at)].parent;
    } while (at != kNone && nodes_[static_cast<size_t>(at)].children == 1 &&
             nodes_[static_cast<size_t>(at)].snapshot == kNone);
  }
  const bool parted = node.children > 1 && IsTailOrEnd(s.kind);
  const SnapshotKind kind = parted ? SnapshotKind::kJunction : s.kind;
  double reuse = Probability(kind) * s.reuse;
  if (node.children == 1 && IsTailOrEnd(kind)) reuse *= options_.passed;
  const double freed = static_cast<double>(options_.snapshot_bytes) +
                       static_cast<double>(freed_blocks * options_.block_bytes);
  return std::log(static_cast<double>(node.blocks - start) * reuse / std::max(freed, 1.0)) +
         absl::ToDoubleSeconds(s.used - absl::UnixEpoch()) /
             absl::ToDoubleSeconds(options_.reuse_decay);
}

void PrefixTree::Reorder(Index index) {
  Dequeue(index);
  Snapshot& s = snapshots_[static_cast<size_t>(index)];
  s.order = Order(s);
  Enqueue(index);
}

void PrefixTree::Enqueue(Index index) {
  const Snapshot& s = snapshots_[static_cast<size_t>(index)];
  order_.emplace(s.order, index);
  if (s.charged > 0) tenants_.at(s.tenant).order.emplace(s.order, index);
}

void PrefixTree::Dequeue(Index index) {
  const Snapshot& s = snapshots_[static_cast<size_t>(index)];
  order_.erase({s.order, index});
  if (s.charged > 0) tenants_.at(s.tenant).order.erase({s.order, index});
}

// ---- whose breakpoints ---------------------------------------------------------------------------

void PrefixTree::Own(Index index, uint64_t tenant) {
  Snapshot& s = snapshots_[static_cast<size_t>(index)];
  if (s.tenant == 0) s.tenant = tenant;
  Charge(index);
}

void PrefixTree::Charge(Index index) {
  Snapshot& s = snapshots_[static_cast<size_t>(index)];
  if (s.tenant == 0 || s.kind != SnapshotKind::kBreakpoint || s.charged > 0) return;
  const Index above = SnapshotAbove(s.node);
  const int64_t latents = BlocksOf(index) - (above == kNone ? 0 : BlocksOf(above));
  s.charged = std::max<int64_t>(1, options_.snapshot_bytes + latents * options_.block_bytes);
  Tenant& tenant = tenants_[s.tenant];
  tenants_by_size_.erase({tenant.bytes, s.tenant});
  tenant.bytes += s.charged;
  tenants_by_size_.emplace(tenant.bytes, s.tenant);
  tenant.order.emplace(s.order, index);
}

void PrefixTree::Discharge(Index index) {
  Snapshot& s = snapshots_[static_cast<size_t>(index)];
  if (s.charged == 0) return;
  const auto found = tenants_.find(s.tenant);
  Tenant& tenant = found->second;
  tenant.order.erase({s.order, index});
  tenants_by_size_.erase({tenant.bytes, s.tenant});
  tenant.bytes -= std::exchange(s.charged, 0);
  if (tenant.order.empty()) {
    tenants_.erase(found);
  } else {
    tenants_by_size_.emplace(tenant.bytes, s.tenant);
  }
}

int64_t PrefixTree::BreakpointBytes(uint64_t tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.bytes;
}

std::optional<uint64_t> PrefixTree::MostOverShare(std::span<const Index> gone) const {
  double most = options_.breakpoint_share * static_cast<double>(options_.bytes_max);
  std::optional<uint64_t> found;
  for (auto i = tenants_by_size_.rbegin(); i != tenants_by_size_.rend(); ++i) {
    int64_t bytes = i->first;
    if (static_cast<double>(bytes) <= most) break;
    for (const Index index : gone) {
      const Snapshot& s = snapshots_[static_cast<size_t>(index)];
      if (s.tenant == i->second) bytes -= s.charged;
    }
    if (static_cast<double>(bytes) <= most) continue;
    most = static_cast<double>(bytes);
    found = i->second;
  }
  return found;
}

PrefixTree::Index PrefixTree::OverShare(Index next, Index protect,
                                        std::span<const Index> gone) const {
  const std::optional<uint64_t> tenant = MostOverShare(gone);
  if (!tenant || snapshots_[static_cast<size_t>(next)].tenant == *tenant) return kNone;
  for (const auto& [order, index] : tenants_.at(*tenant).order) {
    if (snapshots_[static_cast<size_t>(index)].node == protect) continue;
    if (std::find(gone.begin(), gone.end(), index) == gone.end()) return index;
  }
  return kNone;
}

bool PrefixTree::EvictOne() { return EvictOneBut(kNone); }

// What a snapshot is worth changes with its neighbours, so it is looked at again before it goes.
bool PrefixTree::EvictOneBut(Index protect) {
  for (auto i = order_.begin(); i != order_.end();) {
    if (snapshots_[static_cast<size_t>(i->second)].node == protect) {
      ++i;
      continue;
    }
    const Index instead = OverShare(i->second, protect, {});
    const Index victim = instead != kNone ? instead : i->second;
    const Snapshot& s = snapshots_[static_cast<size_t>(victim)];
    if (Order(s) > s.order) {
      Reorder(victim);
      i = order_.begin();
      continue;
    }
    ++stats_.evicted;
    stats_.over_share += instead != kNone;
    DropSnapshot(victim, true);
    return true;
  }
  return false;
}

void PrefixTree::Drop(const PrefixKey& key) {
  CHECK(HasSnapshot(key), "no snapshot at %s", key.Hex());
  DropSnapshot(nodes_[static_cast<size_t>(NodeOf(key))].snapshot, false);
}

void PrefixTree::Clear() {
  while (EvictOne()) {
  }
  outcomes_ = {};
}

// ---- checks --------------------------------------------------------------------------------------

std::string PrefixTree::Check() const {
  int64_t blocks = 0, snapshots = 0;
  std::vector<int32_t> children(nodes_.size());
  for (const Node& node : nodes_) {
    if (node.blocks > 0 && node.parent != kNone) ++children[static_cast<size_t>(node.parent)];
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    if (node.blocks == 0) continue;
    ++blocks;
    snapshots += node.snapshot != kNone;
    const int32_t above =
        node.parent == kNone ? 0 : nodes_[static_cast<size_t>(node.parent)].blocks;
    if (NodeOf(node.key) != static_cast<Index>(i)) return "a node is not found by its key";
    if (node.blocks != above + 1 || (node.parent != kNone && above == 0)) {
      return "a node's parent is gone";
    }
    if (node.children != children[i]) return "children are miscounted";
    if (node.children == 0 && node.snapshot == kNone) return "a leaf has no snapshot";
    if (node.snapshot != kNone &&
        snapshots_[static_cast<size_t>(node.snapshot)].node != static_cast<Index>(i)) {
      return "a snapshot stands elsewhere";
    }
  }
  if (blocks != stats_.blocks || snapshots != stats_.snapshots) return "sizes are miscounted";
  if (order_.size() != static_cast<size_t>(snapshots)) return "the order misses snapshots";
  absl::flat_hash_map<uint64_t, std::pair<int64_t, size_t>> charged;
  for (size_t i = 0; i < snapshots_.size(); ++i) {
    const Snapshot& s = snapshots_[i];
    if (s.node == kNone || s.charged == 0) continue;
    if (s.kind != SnapshotKind::kBreakpoint) return "what is no breakpoint is charged";
    charged[s.tenant].first += s.charged;
    ++charged[s.tenant].second;
    if (!tenants_.contains(s.tenant) ||
        !tenants_.at(s.tenant).order.contains({s.order, static_cast<Index>(i)})) {
      return "a tenant misses a breakpoint";
    }
  }
  if (charged.size() != tenants_.size() || charged.size() != tenants_by_size_.size()) {
    return "tenants without breakpoints";
  }
  for (const auto& [tenant, sum] : charged) {
    if (BreakpointBytes(tenant) != sum.first || !tenants_by_size_.contains({sum.first, tenant}) ||
        tenants_.at(tenant).order.size() != sum.second) {
      return "a tenant's breakpoints are miscounted";
    }
  }
  if (by_key_.size() != static_cast<size_t>(blocks)) return "keys without nodes";
  if (bytes() > options_.bytes_max) return "over the budget";
  return "";
}

}  // namespace deltamesh
