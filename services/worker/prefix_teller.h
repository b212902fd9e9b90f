// Tells routers what the prefix cache holds: everything once, then every change, in messages of bounded size
// that count up, so that a router notices when one is missing.
//
// Not thread-safe: part of a core.
#pragma once

#include <cstdint>
#include <deque>
#include <map>

#include "runtime/cache/prefix_cache.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

class PrefixTeller {
 public:
  // `cache` may be null: there is nothing to tell. Not owned.
  explicit PrefixTeller(PrefixCache* cache) : cache_(cache) {}

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

  void Gather();

  PrefixCache* const cache_;
  std::map<LinkId, Listener> listeners_;
};

}  // namespace deltamesh
