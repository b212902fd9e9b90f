// Keeps the prefix index in step with what workers tell. A message that is out of order makes the worker
// unknown until it has begun anew; the others are not touched.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "deltamesh/mesh/mesh.pb.h"
#include "services/common/link.h"
#include "services/router/prefix_index.h"

namespace deltamesh {

class PrefixFeed {
 public:
  enum class Heard {
    kTaken,
    kResync,     // a message is missing: ask the worker to begin anew
    kIgnored,    // sent before it was asked
    kMalformed,  // as kResync, and a breach of the protocol
  };

  Heard OnChanges(LinkId link, const mesh::PrefixChanges& message);
  // The worker is gone, or nobody knows what it has.
  void Forget(LinkId link);

  // By link, for workers that have a part of the prompt.
  std::map<LinkId, IndexMatch> Find(std::span<const uint64_t> keys) const;

  // Clears up after workers that left; bounded work. Call often.
  void Sweep() { index_.Sweep(); }

  bool empty() const { return workers_.empty(); }
  const PrefixIndex& index() const { return index_; }
  // Grows with every change of what Find would say.
  uint64_t version() const { return version_; }
  int64_t unknown() const;  // workers whose prefixes are not all told yet

 private:
  struct Told {
    WorkerSlot slot = -1;  // -1: it was asked to begin anew
    uint64_t next = 0;
    bool complete = false;
  };

  PrefixIndex index_;
  uint64_t version_ = 1;
  std::map<LinkId, Told> workers_;
  std::map<WorkerSlot, LinkId> links_;
  std::vector<IndexChange> batch_;
};

}  // namespace deltamesh
