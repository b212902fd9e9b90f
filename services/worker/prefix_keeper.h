// What an attention worker does with its prefix cache around a request: names its prefixes, restores the
// deepest one, tells the engine where snapshots are due, and keeps them.
//
// Not thread-safe: part of a core.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/cache/prefix_cache.h"
#include "runtime/engine/engine.h"
#include "runtime/prefix/prefix_hash.h"
#include "services/worker/metric_list.h"
#include "services/worker/state_tier.h"

namespace deltamesh {

// One request's part. Must stay in place while its sequence runs.
struct KeptPrompt {
  std::optional<PrefixChain>
      chain;  // of the prompt, then also of the answer; none: nothing is kept
  uint64_t session = 0;
  std::vector<int64_t> breakpoints;
  int64_t junction = 0;  // CutHints
  std::vector<CutPoint> cuts;
  int64_t reach = 0;                     // positions of the prompt that a state may stand at
  int64_t restored = 0;                  // positions that were restored here
  std::optional<StagedSnapshot> answer;  // at the last block boundary of what was generated

  std::span<const PrefixKey> path() const {
    return std::span(chain->keys()).first(static_cast<size_t>(reach / kBlockTokens));
  }
};

class PrefixKeeper {
 public:
  // `cache` may be null: nothing is found or kept. So may `tier`, with or without it. Not owned; must outlive
  // this.
  PrefixKeeper(PrefixCache* cache, StateTier* tier, const mesh::ModelIdentity& model);

  // Names the prefixes of `tokens`, of which the first `reach` positions, a multiple of 64, may be
  // restored or kept.
  void Open(const mesh::CacheHints& hints, std::span<const TokenId> tokens, int64_t reach,
            KeptPrompt* prompt) const;
  // Has a deeper state than memory's read, if that is worth it; null: it is not. While it is read nothing
  // else is held for the prompt.
  StateLoadRef Load(const KeptPrompt& prompt, double tokens_per_second, absl::Time now);
  bool Ended(const StateLoadRef& load, absl::Time now) { return tier_->Ended(load, now); }
  // What the store has read and written meanwhile takes effect. Often.
  void Poll(absl::Time now);
  // The deepest state that is here (null: none), and what the engine needs to keep more of the prompt,
  // in `spec`. RESOURCE_EXHAUSTED: a state is here, but no slab is free.
  absl::Status Restore(KeptPrompt* prompt, SequenceSpec* spec, absl::Time now);
  // The same with a state that came from another worker, unless a deeper one is here.
  absl::Status Adopt(KeptPrompt* prompt, std::unique_ptr<SequenceState> state, SequenceSpec* spec,
                     absl::Time now);
  // Positions of the prompt that could be restored.
  int64_t Held(const KeptPrompt& prompt) const;
  // Leading blocks of the prompt that need not be sent here.
  std::vector<SlotRef> Latents(const KeptPrompt& prompt) const;
  // A state that came from elsewhere and stands at a block boundary up to `reach`.
  void KeepArrived(const KeptPrompt& prompt, const SequenceState& state, absl::Time now);

  // Snapshots are due at the block boundaries of the answer too.
  void WatchAnswer(KeptPrompt* prompt, SequenceSpec* spec);
  void Generated(KeptPrompt* prompt, std::span<const TokenId> tokens) const;
  // The answer ended, well or because its client had enough: its end is likely to be continued.
  void KeepAnswer(KeptPrompt* prompt, absl::Time now);

  // The time for what happens until the next call.
  void SetTime(absl::Time now) { now_ = now; }

  // Blocks that the cache would give up count as free. Counted now and then: it takes a pass over them.
  // Metrics have the last count.
  void AddReclaimable(mesh::Heartbeat* load);
  // How fast the tiers below are read.
  void AddStoreRates(mesh::Heartbeat* load) const;
  void AddMetrics(MetricList& list) const;

 private:
  void AtCut(KeptPrompt* prompt, const SequenceState& state);
  void PlanCuts(KeptPrompt* prompt, const PrefixMatch& match, SequenceSpec* spec);

  PrefixCache* const cache_;
  StateTier* const tier_;
  const std::string model_;
  absl::Time now_ = absl::InfinitePast();
  absl::Time counted_ = absl::InfinitePast();
  int64_t reclaimable_ = 0;
};

}  // namespace deltamesh
