#include "services/router/prefix_feed.h"

#include <algorithm>

namespace deltamesh {

PrefixFeed::Heard PrefixFeed::OnChanges(LinkId link, const mesh::PrefixChanges& message) {
  const std::string& what = message.changes();
  if (static_cast<size_t>(message.keys_size()) != what.size() ||
      !std::all_of(what.begin(), what.end(),
                   [](char c) { return mesh::PrefixChanges::What_IsValid(c); })) {
    Forget(link);
    workers_[link] = {};
    return Heard::kMalformed;
  }
  if (message.sequence() == 0) {
    Forget(link);
    const WorkerSlot slot = index_.AddWorker();
    workers_[link] = {.slot = slot};
    links_[slot] = link;
  }
  Told& told = workers_[link];
  if (told.slot < 0) return Heard::kIgnored;
  if (message.sequence() != told.next) {
    Forget(link);
    workers_[link] = {};
    return Heard::kResync;
  }
  ++told.next;
  ++version_;
  batch_.clear();
  for (int i = 0; i < message.keys_size(); ++i) {
    batch_.push_back(
        {static_cast<IndexChange::What>(what[static_cast<size_t>(i)]), message.keys(i)});
  }
  index_.Apply(told.slot, batch_);
  if (message.complete() && !told.complete) {
    told.complete = true;
    index_.Trust(told.slot);
  }
  return Heard::kTaken;
}

void PrefixFeed::Forget(LinkId link) {
  const auto found = workers_.find(link);
  if (found == workers_.end()) return;
  ++version_;
  if (found->second.slot >= 0) {
    index_.RemoveWorker(found->second.slot);
    links_.erase(found->second.slot);
  }
  workers_.erase(found);
}

std::map<LinkId, IndexMatch> PrefixFeed::Find(std::span<const uint64_t> keys) const {
  std::map<LinkId, IndexMatch> out;
  for (const IndexMatch& match : index_.Find(keys)) out[links_.at(match.worker)] = match;
  return out;
}

int64_t PrefixFeed::unknown() const {
  return std::count_if(workers_.begin(), workers_.end(),
                       [](const auto& entry) { return !entry.second.complete; });
}

}  // namespace deltamesh
