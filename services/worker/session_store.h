// What a worker's store does for sessions. Calls return at once; every one is answered by exactly one
// SessionStoreDone under its ticket, in any order.
//
// Not thread-safe: belongs to the thread of the core.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/prefix/prefix_key.h"

namespace deltamesh {

struct SessionStoreDone {
  uint64_t ticket = 0;
  absl::Status status;
  int64_t blocks = 0;    // of the state that was written or is in memory now; 0: there was none
  uint64_t bytes = 0;    // written or read
  std::string tier;      // it went to or came from: "memory", "disk", "object store"
  std::string content;   // of GetRecord
  bool partial = false;  // of it: a tier could not be asked that may have a newer one
};

class SessionStore {
 public:
  virtual ~SessionStore() = default;

  // Writes the deepest state along `path` to the lowest tier, unless it is there, and drops it from memory.
  // OK with no blocks when there is no state.
  virtual void Suspend(uint64_t ticket, std::span<const PrefixKey> path) = 0;
  // Brings the deepest state along `path` into memory. OK with no blocks when there is none.
  virtual void Load(uint64_t ticket, std::span<const PrefixKey> path) = 0;
  // The content is a serialised mesh::SessionRecord. ABORTED: a newer one is stored.
  virtual void PutRecord(uint64_t ticket, const std::string& name, std::string content) = 0;
  // The newest of all tiers'. NOT_FOUND: no tier has one. DATA_LOSS: it is damaged. FAILED_PRECONDITION: it
  // is of another format. UNAVAILABLE: a tier could not be asked, and no other has one; where one
  // has, `partial` says so.
  virtual void GetRecord(uint64_t ticket, const std::string& name) = 0;
  // Nobody waits for the answer any more: what has not begun need not be done. It is answered all the same.
  virtual void Abandon(uint64_t ticket) = 0;
  // What ended since the last call.
  virtual std::vector<SessionStoreDone> TakeDone() = 0;
};

}  // namespace deltamesh
