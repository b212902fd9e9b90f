#include "services/worker/prefix_teller.h"

#include <algorithm>
#include <utility>

namespace deltamesh {
namespace {

constexpr size_t kFactsPerMessage = 4096;       // 36 KiB
constexpr size_t kMessagesAtOnce = 4;           // per link and call
constexpr size_t kUntoldMax = size_t{4} << 20;  // then telling everything again is cheaper

mesh::PrefixChanges::What WhatOf(PrefixChange::What what) {
  switch (what) {
    case PrefixChange::kBlockAdded:
      return mesh::PrefixChanges::LATENTS_ADDED;
    case PrefixChange::kBlockDropped:
      return mesh::PrefixChanges::LATENTS_DROPPED;
    case PrefixChange::kSnapshotAdded:
      return mesh::PrefixChanges::SNAPSHOT_ADDED;
    case PrefixChange::kSnapshotDropped:
      return mesh::PrefixChanges::SNAPSHOT_DROPPED;
  }
  return mesh::PrefixChanges::LATENTS_DROPPED;
}

}  // namespace

void PrefixTeller::Begin(LinkId link) {
  if (cache_ == nullptr) return;
  Gather();  // for the others: what comes from the tree is up to date
  Listener listener;
  cache_->tree().ForEach([&](const PrefixKey& key, int64_t, bool snapshot) {
    listener.untold.push_back({key.index(), mesh::PrefixChanges::LATENTS_ADDED});
    if (snapshot) listener.untold.push_back({key.index(), mesh::PrefixChanges::SNAPSHOT_ADDED});
  });
  listeners_[link] = std::move(listener);
}

void PrefixTeller::Gather() {
  for (const PrefixChange& change : cache_->TakeChanges()) {
    for (auto& [link, listener] : listeners_) {
      listener.untold.push_back({change.key.index(), WhatOf(change.what)});
    }
  }
}

void PrefixTeller::Tell(WorkerLinks& links) {
  if (cache_ == nullptr) return;
  Gather();
  for (auto& [link, listener] : listeners_) {
    if (listener.untold.size() > kUntoldMax) Begin(link);
    for (size_t n = 0; n < kMessagesAtOnce; ++n) {
      if (listener.untold.empty() && listener.complete) break;
      mesh::WorkerMessage message;
      mesh::PrefixChanges* out = message.mutable_prefixes();
      out->set_sequence(listener.sequence++);
      const size_t count = std::min(listener.untold.size(), kFactsPerMessage);
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
