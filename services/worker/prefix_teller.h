// Tells routers what the prefix cache and the tiers below it hold: everything once, then every change, in
// messages of bounded size that count up, so that a router notices when one is missing.
//
// A block is held while memory or disk has its latents; a snapshot in memory hides the one on disk. Both have
// their latents without gaps, at every moment, so what they have together has none either. States of the
// object store are facts of their own: each has its latents with it.
//
// Not thread-safe: part of a core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>

#include "absl/container/flat_hash_map.h"
#include "runtime/cache/prefix_cache.h"
#include "services/worker/state_tier.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

struct PrefixTellerLimits {
  size_t message_facts = 4096;  // 36 KiB
  size_t messages_at_once = 4;  // per link and call
  // Facts that wait for a link until it is told everything anew; more where more is held (UntoldMax).
  size_t untold_max = size_t{4} << 20;
};

class PrefixTeller {
 public:
  // `cache` may be null: there is nothing to tell. So may `tier`. Not owned.
  PrefixTeller(PrefixCache* cache, StateTier* tier, const PrefixTellerLimits& limits = {})
      : cache_(cache), tier_(tier), limits_(limits) {}

  // Begins anew with everything that is held.
  void Begin(LinkId link);
  void End(LinkId link) { listeners_.erase(link); }

  // Queues what is new on every link, a bounded part of it.
  void Tell(WorkerLinks& links);

 private:
  struct Fact {
    uint64_t key;
    mesh::PrefixChanges::What what;
  };
  struct Listener {
    uint64_t sequence = 0;
    bool complete = false;  // was said
    std::deque<Fact> untold;
  };

  // Where the latents and the snapshot of a block are.
  enum Held : uint8_t {
    kLatents = 1,
    kStoredLatents = 2,
    kSnapshot = 4,
    kStoredSnapshot = 8,
    kObject = 16,
  };

  void Gather();
  void GatherBelow();
  void Change(uint64_t key, Held bit, bool held);
  void Say(uint64_t key, mesh::PrefixChanges::What what);
  size_t UntoldMax() const;

  PrefixCache* const cache_;
  StateTier* const tier_;
  const PrefixTellerLimits limits_;
  absl::flat_hash_map<uint64_t, uint8_t> held_;
  std::map<LinkId, Listener> listeners_;
};

}  // namespace deltamesh
