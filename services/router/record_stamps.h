// The newest record that a router knows of each session, by its time: what it wrote, or read. Bounded; what
// was noted least recently goes first.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "services/router/session_id.h"

namespace deltamesh {

class RecordStamps {
 public:
  static constexpr size_t kMax = size_t{1} << 16;

  void Note(const SessionId& id, uint64_t stamp) {
    if (const auto found = by_id_.find(id); found != by_id_.end()) {
      found->second->second = std::max(found->second->second, stamp);
      order_.splice(order_.end(), order_, found->second);
      return;
    }
    if (by_id_.size() >= kMax) {
      by_id_.erase(order_.front().first);
      order_.pop_front();
    }
    by_id_[id] = order_.insert(order_.end(), {id, stamp});
  }
  // 0: none is known.
  uint64_t Of(const SessionId& id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? 0 : found->second->second;
  }

 private:
  using Order = std::list<std::pair<SessionId, uint64_t>>;
  Order order_;  // the least recently noted first
  absl::flat_hash_map<SessionId, Order::iterator> by_id_;
};

}  // namespace deltamesh
