// The sessions a router remembers: their tokens, and little else. Bounded in entries and bytes. For room the
// least recently used session of the tenant that holds most is forgotten - most bytes where these lack, most
// sessions where entries do - so that no tenant can push out those of others that hold less.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "absl/time/time.h"
#include "runtime/base/ids.h"
#include "services/router/session_id.h"

namespace deltamesh {

using SessionTokens = std::shared_ptr<const std::vector<TokenId>>;

// What lies in a store under a session's name, as this router knows it.
struct StoredRecord {
  uint64_t stamp = 0;     // SessionRecord.suspended_unix_ns; the next one has a larger
  uint64_t position = 0;  // of the stored state, and
  std::string key;        // its name; empty: not known
  std::string worker;     // that read or wrote it

  // The session may not go on from the tokens that the state is of (`of` begins with them): then no state is
  // stored for it.
  void OnlyOf(const std::vector<TokenId>& of, const std::vector<TokenId>& tokens);
};

struct Session {
  SessionTokens tokens;  // shared by forks
  bool ended = false;    // the newest answer ended with a stop token
  absl::Time used;
  uint64_t version = 0;  // another one after every change of the above
  RequestId turn;        // that left the tokens; empty: none of this router's
  std::string salt;
  std::optional<StoredRecord> record;
  // Every store that had joined by then (their count) was asked for a record: without `record` none of them
  // has one. 0: they were not.
  uint64_t asked = 0;
};

class SessionTable {
 public:
  // Bytes of an entry beside its tokens, about.
  static constexpr int64_t kEntryBytes = 256;
  static int64_t BytesOf(const Session& session) {
    return kEntryBytes + static_cast<int64_t>(session.tokens->size() * sizeof(TokenId));
  }

  // `evicted` hears of every session that finds no room here, before or after it was in; may be null. It
  // must not call this table.
  using Evicted = std::function<void(const SessionId& id, const Session& session)>;
  SessionTable(int64_t sessions_max, int64_t bytes_max, Evicted evicted = nullptr)
      : sessions_max_(sessions_max), bytes_max_(bytes_max), on_evicted_(std::move(evicted)) {}

  // Replaces what was there, but for what is known of its record. False when it alone is larger than all
  // room: then there is none of that name.
  bool Put(const SessionId& id, const std::string& salt, SessionTokens tokens, bool ended,
           absl::Time now, RequestId turn = "");
  // The same with all that is known of it; without a version it gets one.
  bool Insert(const SessionId& id, Session session);
  // Null: not known. Does not count as a use.
  const Session* Find(const SessionId& id) const;
  void Touch(const SessionId& id, absl::Time now);
  void SetRecord(const SessionId& id, StoredRecord record);
  void SetAsked(const SessionId& id, uint64_t stores);
  void Erase(const SessionId& id);

  int64_t sessions() const { return static_cast<int64_t>(by_id_.size()); }
  int64_t bytes() const { return bytes_; }  // tokens that forks share are counted for each
  uint64_t evicted() const { return evicted_; }

 private:
  struct Entry {
    SessionId id;
    Session session;
  };
  using Order = std::list<Entry>;  // the least recently used first
  struct Tenant {
    Order order;
    int64_t bytes = 0;
    int64_t entries = 0;
  };

  void Erase(Order::iterator entry);
  void Count(const std::string& salt, int64_t bytes, int64_t entries);

  const int64_t sessions_max_, bytes_max_;
  const Evicted on_evicted_;
  absl::node_hash_map<std::string, Tenant> tenants_;  // by salt
  std::set<std::pair<int64_t, std::string>> by_bytes_;
  std::set<std::tuple<int64_t, int64_t, std::string>> by_count_;  // of entries, then bytes
  absl::flat_hash_map<SessionId, Order::iterator> by_id_;
  int64_t bytes_ = 0;
  uint64_t next_version_ = 1;
  uint64_t evicted_ = 0;
};

}  // namespace deltamesh
