#include "runtime/store/store_index.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/base/status.h"

namespace deltamesh {

StoredState StoredState::Of(const StateHeader& h, absl::Time used, uint64_t version) {
  return {.key = h.key,
          .parent = h.parent,
          .blocks = h.blocks,
          .from = h.from,
          .kind = h.kind,
          .bytes = h.file_bytes(),
          .used = used,
          .version = version,
          .keys = h.keys};
}

std::span<const PrefixKey> StoreIndex::OwnKeys(const StoredState& state) {
  if (!state.keys.empty() || state.from == state.blocks) return state.keys;
  return {&state.key, 1};
}

// ---- what is there -------------------------------------------------------------------------------

const StoredState* StoreIndex::Find(const PrefixKey& key) const {
  const auto found = states_.find(key);
  return found == states_.end() ? nullptr : &found->second.state;
}

bool StoreIndex::Complete(const PrefixKey& key) const {
  const auto found = states_.find(key);
  return found != states_.end() && found->second.complete;
}

bool StoreIndex::HasChildren(const PrefixKey& key) const { return children_.contains(key); }

int64_t StoreIndex::Deepest(std::span<const PrefixKey> path) const {
  for (size_t n = path.size(); n > 0; --n) {
    const auto found = states_.find(path[n - 1]);
    if (found != states_.end() && found->second.complete &&
        found->second.state.blocks == static_cast<int64_t>(n)) {
      return static_cast<int64_t>(n);
    }
  }
  return 0;
}

StoreMatch StoreIndex::Match(std::span<const PrefixKey> path) const {
  StoreMatch match;
  match.snapshot = SnapshotBlocks(Deepest(path));
  if (match.snapshot.value() > 0) {
    const PrefixKey& key = path[static_cast<size_t>(match.snapshot.value() - 1)];
    match.files = static_cast<int64_t>(Chain(key).size());
    match.kind = Find(key)->kind;
  }
  return match;
}

std::vector<StoredPart> StoreIndex::Chain(const PrefixKey& key) const {
  std::vector<StoredPart> parts;
  PrefixKey at = key;
  for (int64_t end = states_.at(key).state.blocks; parts.empty() || end > 0;) {
    const StoredState& state = states_.at(at).state;
    parts.push_back({at, state.from, end});
    end = state.from;
    at = state.parent;
  }
  return parts;
}

StoreIndex::Cover StoreIndex::Covered(std::span<const PrefixKey> path) const {
  for (size_t n = path.size(); n > 0; --n) {
    const auto found = owners_.find(path[n - 1]);
    if (found != owners_.end()) return {static_cast<int64_t>(n), found->second.front()};
  }
  return {};
}

// ---- what comes and goes -------------------------------------------------------------------------

bool StoreIndex::CanComplete(const StoredState& state) const {
  if (state.from == 0) return true;
  const auto found = states_.find(state.parent);
  if (found == states_.end() || !found->second.complete) return false;
  const StoredState& parent = found->second.state;
  return parent.from < state.from && state.from <= parent.blocks;
}

bool StoreIndex::Add(StoredState state) {
  if (Complete(state.key)) return false;
  Remove(state.key);
  const PrefixKey key = state.key;
  if (state.from > 0) {
    children_[state.parent].push_back(key);
    Requeue(state.parent);
  }
  bytes_ += state.bytes;
  states_[key].state = std::move(state);
  if (CanComplete(states_.at(key).state)) CompleteFrom(key);
  Requeue(key);
  return true;
}

bool StoreIndex::Remove(const PrefixKey& key) {
  const auto found = states_.find(key);
  if (found == states_.end()) return false;
  if (found->second.complete) IncompleteFrom(key);
  Entry& entry = found->second;
  if (entry.queued) order_.erase({entry.order, key});
  bytes_ -= entry.state.bytes;
  const bool child = entry.state.from > 0;
  const PrefixKey parent = entry.state.parent;
  states_.erase(found);
  if (child) {
    Keys& siblings = children_.at(parent);
    siblings.erase(std::find(siblings.begin(), siblings.end(), key));
    if (siblings.empty()) children_.erase(parent);
    Requeue(parent);
  }
  return true;
}

void StoreIndex::Touch(const PrefixKey& key, absl::Time used) {
  const auto found = states_.find(key);
  if (found == states_.end()) return;
  found->second.state.used = std::max(found->second.state.used, used);
  Requeue(key);
}

// The file and what waited for it, parents first.
void StoreIndex::CompleteFrom(const PrefixKey& key) {
  std::vector<PrefixKey> reached = {key};
  while (!reached.empty()) {
    const PrefixKey at = reached.back();
    reached.pop_back();
    const auto found = states_.find(at);
    if (found == states_.end() || found->second.complete || !CanComplete(found->second.state))
      continue;
    found->second.complete = true;
    for (const PrefixKey& block : OwnKeys(found->second.state)) {
      Keys& owners = owners_[block];
      if (owners.empty()) Tell(StoreChange::kBlockAdded, block);
      owners.push_back(at);
    }
    Tell(StoreChange::kSnapshotAdded, at);
    Requeue(at);
    if (const auto children = children_.find(at); children != children_.end()) {
      reached.insert(reached.end(), children->second.begin(), children->second.end());
    }
  }
}

// The file and all that needs it, children first.
void StoreIndex::IncompleteFrom(const PrefixKey& key) {
  std::vector<PrefixKey> order, reached = {key};
  while (!reached.empty()) {
    const PrefixKey at = reached.back();
    reached.pop_back();
    const auto found = states_.find(at);
    if (found == states_.end() || !found->second.complete) continue;
    order.push_back(at);
    if (const auto children = children_.find(at); children != children_.end()) {
      reached.insert(reached.end(), children->second.begin(), children->second.end());
    }
  }
  for (auto at = order.rbegin(); at != order.rend(); ++at) {
    Entry& entry = states_.at(*at);
    entry.complete = false;
    Tell(StoreChange::kSnapshotDropped, *at);
    const std::span<const PrefixKey> own = OwnKeys(entry.state);
    for (auto block = own.rbegin(); block != own.rend(); ++block) {
      Keys& owners = owners_.at(*block);
      owners.erase(std::find(owners.begin(), owners.end(), *at));
      if (!owners.empty()) continue;
      owners_.erase(*block);
      Tell(StoreChange::kBlockDropped, *block);
    }
    Requeue(*at);
  }
}

std::vector<StoreChange> StoreIndex::Everything() const {
  std::vector<StoreChange> out;
  std::vector<const Entry*> reached;
  absl::flat_hash_map<PrefixKey, bool> told;
  for (const auto& [key, entry] : states_) {
    if (entry.complete && entry.state.from == 0) reached.push_back(&entry);
  }
  while (!reached.empty()) {
    const Entry& entry = *reached.back();
    reached.pop_back();
    for (const PrefixKey& block : OwnKeys(entry.state)) {
      if (std::exchange(told[block], true)) continue;
      out.push_back({StoreChange::kBlockAdded, block});
    }
    out.push_back({StoreChange::kSnapshotAdded, entry.state.key});
    const auto children = children_.find(entry.state.key);
    if (children == children_.end()) continue;
    for (const PrefixKey& child : children->second) {
      const Entry& next = states_.at(child);
      if (next.complete) reached.push_back(&next);
    }
  }
  return out;
}

// ---- what goes first -----------------------------------------------------------------------------

double StoreIndex::OrderOf(const Entry& entry) const {
  if (!entry.complete) return -std::numeric_limits<double>::infinity();
  const StoredState& s = entry.state;
  const double tokens = static_cast<double>(std::max<int64_t>(1, s.blocks - s.from));
  const double reuse = worth_.reuse[static_cast<size_t>(s.kind)];
  return std::log(tokens * reuse / static_cast<double>(std::max<int64_t>(1, s.bytes))) +
         absl::ToDoubleSeconds(s.used - absl::UnixEpoch()) /
             absl::ToDoubleSeconds(worth_.reuse_decay);
}

void StoreIndex::Requeue(const PrefixKey& key) {
  const auto found = states_.find(key);
  if (found == states_.end()) return;
  Entry& entry = found->second;
  if (entry.queued) order_.erase({entry.order, key});
  entry.queued = !HasChildren(key);
  if (!entry.queued) return;
  entry.order = OrderOf(entry);
  order_.emplace(entry.order, key);
}

double StoreIndex::Worth(const PrefixKey& key) const { return OrderOf(states_.at(key)); }

std::optional<PrefixKey> StoreIndex::Least(std::span<const PrefixKey> keep) const {
  for (const auto& [order, key] : order_) {
    if (std::find(keep.begin(), keep.end(), key) == keep.end()) return key;
  }
  return std::nullopt;
}

std::vector<PrefixKey> StoreIndex::Leaves(size_t most) const {
  std::vector<PrefixKey> leaves;
  for (auto at = order_.begin(); at != order_.end() && leaves.size() < most; ++at) {
    leaves.push_back(at->second);
  }
  return leaves;
}

}  // namespace deltamesh
