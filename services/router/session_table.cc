#include "services/router/session_table.h"

#include <utility>

namespace deltamesh {

bool SessionTable::Put(const SessionId& id, SessionTokens tokens, bool ended, absl::Time now) {
  Erase(id);
  Entry entry{id, {std::move(tokens), ended, now, next_version_++}};
  const int64_t bytes = BytesOf(entry.session);
  if (bytes > bytes_max_) return false;
  while (sessions() >= sessions_max_ || bytes_ + bytes > bytes_max_) {
    Erase(order_.begin());
    ++evicted_;
  }
  bytes_ += bytes;
  by_id_[id] = order_.insert(order_.end(), std::move(entry));
  return true;
}

const Session* SessionTable::Find(const SessionId& id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &found->second->session;
}

void SessionTable::Touch(const SessionId& id, absl::Time now) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return;
  found->second->session.used = now;
  order_.splice(order_.end(), order_, found->second);
}

void SessionTable::Erase(const SessionId& id) {
  const auto found = by_id_.find(id);
  if (found != by_id_.end()) Erase(found->second);
}

void SessionTable::Erase(Order::iterator entry) {
  bytes_ -= BytesOf(entry->session);
  by_id_.erase(entry->id);
  order_.erase(entry);
}

}  // namespace deltamesh
