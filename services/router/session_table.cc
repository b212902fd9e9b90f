#include "services/router/session_table.h"

#include <algorithm>
#include <utility>

namespace deltamesh {

void StoredRecord::OnlyOf(const std::vector<TokenId>& of, const std::vector<TokenId>& tokens) {
  const size_t covered = std::min<size_t>(position, of.size());
  if (tokens.size() >= covered && covered == position &&
      std::equal(of.begin(), of.begin() + static_cast<int64_t>(covered), tokens.begin())) {
    return;
  }
  position = 0;
  key.clear();
}

bool SessionTable::Put(const SessionId& id, const std::string& salt, SessionTokens tokens,
                       bool ended, absl::Time now, RequestId turn) {
  Session session;
  session.tokens = std::move(tokens);
  session.ended = ended;
  session.used = now;
  session.turn = std::move(turn);
  session.salt = salt;
  if (const Session* before = Find(id)) {
    session.record = before->record;
    session.asked = before->asked;
    if (session.record) session.record->OnlyOf(*before->tokens, *session.tokens);
  }
  return Insert(id, std::move(session));
}

bool SessionTable::Insert(const SessionId& id, Session session) {
  Erase(id);
  if (session.version == 0) session.version = next_version_++;
  const int64_t bytes = BytesOf(session);
  if (bytes > bytes_max_) {
    if (on_evicted_) on_evicted_(id, session);
    return false;
  }
  while (sessions() >= sessions_max_ || bytes_ + bytes > bytes_max_) {
    // Where room for both lacks, what frees bytes frees an entry too.
    const std::string& most =
        bytes_ + bytes > bytes_max_ ? by_bytes_.rbegin()->second : std::get<2>(*by_count_.rbegin());
    const Order::iterator least = tenants_.at(most).order.begin();
    const Entry entry = *least;
    Erase(least);
    ++evicted_;
    if (on_evicted_) on_evicted_(entry.id, entry.session);
  }
  const std::string salt = session.salt;
  Count(salt, bytes, 1);
  Order& order = tenants_.at(salt).order;
  by_id_[id] = order.insert(order.end(), Entry{id, std::move(session)});
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

void SessionTable::SetAsked(const SessionId& id, uint64_t stores) {
  const auto found = by_id_.find(id);
  if (found != by_id_.end()) found->second->session.asked = stores;
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
  Count(salt, -bytes, -1);
}

// Of a tenant with nothing left nothing is kept.
void SessionTable::Count(const std::string& salt, int64_t bytes, int64_t entries) {
  Tenant& tenant = tenants_[salt];
  by_bytes_.erase({tenant.bytes, salt});
  by_count_.erase({tenant.entries, tenant.bytes, salt});
  tenant.bytes += bytes;
  tenant.entries += entries;
  bytes_ += bytes;
  if (tenant.entries == 0) {
    tenants_.erase(salt);
  } else {
    by_bytes_.insert({tenant.bytes, salt});
    by_count_.insert({tenant.entries, tenant.bytes, salt});
  }
}

}  // namespace deltamesh
