#include "services/router/session_table.h"

#include <utility>

namespace deltamesh {

bool SessionTable::Put(const SessionId& id, const std::string& salt, SessionTokens tokens,
                       bool ended, absl::Time now) {
  Entry entry;
  entry.id = id;
  entry.session.tokens = std::move(tokens);
  entry.session.ended = ended;
  entry.session.used = now;
  entry.session.version = next_version_++;
  entry.session.salt = salt;
  if (const Session* before = Find(id)) entry.session.record = before->record;
  Erase(id);
  const int64_t bytes = BytesOf(entry.session);
  if (bytes > bytes_max_) return false;
  while (sessions() >= sessions_max_ || bytes_ + bytes > bytes_max_) {
    Erase(tenants_.at(by_bytes_.rbegin()->second).order.begin());
    ++evicted_;
  }
  AddBytes(salt, bytes);
  Order& order = tenants_.at(salt).order;
  by_id_[id] = order.insert(order.end(), std::move(entry));
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
  Order& order = tenants_.at(found->second->session.salt).order;
  order.splice(order.end(), order, found->second);
}

void SessionTable::SetRecord(const SessionId& id, StoredRecord record) {
  const auto found = by_id_.find(id);
  if (found != by_id_.end()) found->second->session.record = std::move(record);
}

void SessionTable::Erase(const SessionId& id) {
  const auto found = by_id_.find(id);
  if (found != by_id_.end()) Erase(found->second);
}

void SessionTable::Erase(Order::iterator entry) {
  const std::string salt = entry->session.salt;
  const int64_t bytes = BytesOf(entry->session);
  by_id_.erase(entry->id);
  tenants_.at(salt).order.erase(entry);
  AddBytes(salt, -bytes);
}

// Of a tenant with nothing left nothing is kept.
void SessionTable::AddBytes(const std::string& salt, int64_t bytes) {
  Tenant& tenant = tenants_[salt];
  by_bytes_.erase({tenant.bytes, salt});
  tenant.bytes += bytes;
  bytes_ += bytes;
  if (tenant.bytes == 0) {
    tenants_.erase(salt);
  } else {
    by_bytes_.insert({tenant.bytes, salt});
  }
}

}  // namespace deltamesh
