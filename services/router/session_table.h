// The sessions a router remembers: their tokens, and little else. Bounded in entries and bytes; the least
// recently used are forgotten.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "runtime/base/ids.h"
#include "services/router/session_id.h"

namespace deltamesh {

using SessionTokens = std::shared_ptr<const std::vector<TokenId>>;

struct Session {
  SessionTokens tokens;  // shared by forks
  bool ended = false;    // the newest answer ended with a stop token
  absl::Time used;
  uint64_t version = 0;  // another one after every change
};

class SessionTable {
 public:
  // Bytes of an entry beside its tokens, about.
  static constexpr int64_t kEntryBytes = 256;

  SessionTable(int64_t sessions_max, int64_t bytes_max)
      : sessions_max_(sessions_max), bytes_max_(bytes_max) {}

  // Replaces what was there. False when it alone is larger than all room: then there is none of that name.
  bool Put(const SessionId& id, SessionTokens tokens, bool ended, absl::Time now);
  // Null: not known. Does not count as a use.
  const Session* Find(const SessionId& id) const;
  void Touch(const SessionId& id, absl::Time now);
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

  static int64_t BytesOf(const Session& session) {
    return kEntryBytes + static_cast<int64_t>(session.tokens->size() * sizeof(TokenId));
  }
  void Erase(Order::iterator entry);

  const int64_t sessions_max_, bytes_max_;
  Order order_;
  absl::flat_hash_map<SessionId, Order::iterator> by_id_;
  int64_t bytes_ = 0;
  uint64_t next_version_ = 1;
  uint64_t evicted_ = 0;
};

}  // namespace deltamesh
