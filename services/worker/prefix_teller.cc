#include "services/worker/prefix_teller.h"

#include <algorithm>
#include <utility>

namespace deltamesh {

void PrefixTeller::Begin(LinkId link) {
  if (cache_ == nullptr) return;
  Gather();  // for the others: what is held is up to date
  Listener listener;
  for (const auto& [key, held] : held_) {
    if (held & (kLatents | kStoredLatents)) {
      listener.untold.push_back({key, mesh::PrefixChanges::LATENTS_ADDED});
    }
    if (held & kSnapshot) {
      listener.untold.push_back({key, mesh::PrefixChanges::SNAPSHOT_ADDED});
    } else if (held & kStoredSnapshot) {
      listener.untold.push_back({key, mesh::PrefixChanges::SNAPSHOT_COLD});
    }
    if (held & kObject) listener.untold.push_back({key, mesh::PrefixChanges::OBJECT_ADDED});
  }
  listeners_[link] = std::move(listener);
}

// What is below first: a state is written before memory drops it, and should not seem to be gone between.
void PrefixTeller::Gather() {
  if (tier_ != nullptr) GatherBelow();
  for (const PrefixChange& change : cache_->TakeChanges()) {
    const bool block =
        change.what == PrefixChange::kBlockAdded || change.what == PrefixChange::kBlockDropped;
    const bool added =
        change.what == PrefixChange::kBlockAdded || change.what == PrefixChange::kSnapshotAdded;
    Change(change.key.index(), block ? kLatents : kSnapshot, added);
    if (tier_ != nullptr && change.evicted) tier_->OnEvicted(change.key);
  }
}

void PrefixTeller::GatherBelow() {
  const auto added = [](const StoreChange& change) {
    return change.what == StoreChange::kBlockAdded || change.what == StoreChange::kSnapshotAdded;
  };
  for (const StoreChange& change : tier_->TakeChanges(StoreTier::kDisk)) {
    const bool block =
        change.what == StoreChange::kBlockAdded || change.what == StoreChange::kBlockDropped;
    Change(change.key.index(), block ? kStoredLatents : kStoredSnapshot, added(change));
  }
  for (const StoreChange& change : tier_->TakeChanges(StoreTier::kObjects)) {
    Change(change.key.index(), kObject, added(change));
  }
}

void PrefixTeller::Change(uint64_t key, Held bit, bool held) {
  const auto at = held_.try_emplace(key, uint8_t{0}).first;
  const uint8_t before = at->second;
  const auto after = static_cast<uint8_t>(held ? before | bit : before & ~bit);
  at->second = after;
  if (after == 0) held_.erase(at);
  const auto latents = [](uint8_t h) { return (h & (kLatents | kStoredLatents)) != 0; };
  // Of the snapshot: in memory, on disk only, nowhere.
  const auto snapshot = [](uint8_t h) { return h & kSnapshot ? 2 : h & kStoredSnapshot ? 1 : 0; };
  if (latents(after) && !latents(before)) Say(key, mesh::PrefixChanges::LATENTS_ADDED);
  if (snapshot(after) != snapshot(before)) {
    Say(key, snapshot(after) == 2   ? mesh::PrefixChanges::SNAPSHOT_ADDED
             : snapshot(after) == 1 ? mesh::PrefixChanges::SNAPSHOT_COLD
                                    : mesh::PrefixChanges::SNAPSHOT_DROPPED);
  }
  if (!latents(after) && latents(before)) Say(key, mesh::PrefixChanges::LATENTS_DROPPED);
  if ((after & kObject) != (before & kObject)) {
    Say(key, held ? mesh::PrefixChanges::OBJECT_ADDED : mesh::PrefixChanges::OBJECT_DROPPED);
  }
}

void PrefixTeller::Say(uint64_t key, mesh::PrefixChanges::What what) {
  for (auto& [link, listener] : listeners_) listener.untold.push_back({key, what});
}

// Telling everything takes at most three facts a block. Twice that: to begin anew then leaves half or less to
// tell, and what is held, however much, can be told to its end.
size_t PrefixTeller::UntoldMax() const { return std::max(limits_.untold_max, 6 * held_.size()); }

void PrefixTeller::Tell(WorkerLinks& links) {
  if (cache_ == nullptr) return;
  Gather();
  for (auto& [link, listener] : listeners_) {
    if (listener.untold.size() > UntoldMax()) Begin(link);
    for (size_t n = 0; n < limits_.messages_at_once; ++n) {
      if (listener.untold.empty() && listener.complete) break;
      mesh::WorkerMessage message;
      mesh::PrefixChanges* out = message.mutable_prefixes();
      out->set_sequence(listener.sequence++);
      const size_t count = std::min(listener.untold.size(), limits_.message_facts);
      for (size_t i = 0; i < count; ++i) {
        out->add_keys(listener.untold[i].key);
        out->mutable_changes()->push_back(static_cast<char>(listener.untold[i].what));
      }
      listener.untold.erase(listener.untold.begin(),
                            listener.untold.begin() + static_cast<ptrdiff_t>(count));
      listener.complete |= listener.untold.empty();
      out->set_complete(listener.complete);
      links.Send(link, std::move(message));
    }
  }
}

}  // namespace deltamesh
