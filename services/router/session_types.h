// What clients may ask about sessions, as the router's core takes and answers it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "runtime/base/ids.h"
#include "services/router/session_id.h"
#include "services/router/session_table.h"

namespace deltamesh {

struct SessionCall {
  enum class Kind {
    kGet,
    kSuspend,
    kResume,
    kFork,
    kOpen,  // a turn is about to be appended: as kResume, but no other turn may run
  };
  RequestId id;  // comes back in the answer; not in use by another call
  Kind kind = Kind::kGet;
  SessionId session;
  std::string name;  // as the client said it, for errors
  std::string salt;
  absl::Time deadline = absl::InfiniteFuture();
  // kFork.
  SessionId target;
  std::string target_name;
  bool replace = false;
};

struct SessionHolding {
  std::string worker;
  int64_t position = 0;  // tokens of its deepest snapshot there
  bool cold = false;
};

// What of it means something depends on the call.
struct SessionState {
  SessionTokens tokens;
  bool ended = false, suspended = false, running = false;
  absl::Time used;
  int64_t position = 0;
  uint64_t bytes = 0;
  std::string tier, worker;
  std::vector<SessionHolding> holders;  // deepest first
};

// Action of the core: the one answer to a call.
struct SessionAnswered {
  RequestId id;
  absl::Status status;
  SessionState state;
};

// Why calls, or records on the way, were refused.
enum class SessionRefusal {
  kNotFound,
  kRunning,  // a turn, or a suspension
  kExists,
  kNoStore,
  kFull,      // too many calls
  kLost,      // a worker was, or did not answer
  kDamaged,   // a record
  kForeign,   // a record of another model or version
  kStore,     // the worker's store failed
  kDeadline,  // passed, or the client left
  kCount,
};
const char* SessionRefusalName(SessionRefusal why);

struct SessionCounters {
  uint64_t kept = 0;       // turns that became a session's content
  uint64_t overtaken = 0;  // turns that did not: one that began later ended before
  uint64_t suspended = 0, resumed = 0, forked = 0;
  uint64_t recorded = 0;  // records that followed their session
  uint64_t records_retried =
      0;  // times that one could not, or stores did not say whether there is one
  uint64_t records_lost = 0;      // sessions forgotten before theirs could
  uint64_t stores_forgotten = 0;  // workers with one that were away for too long
  std::array<uint64_t, static_cast<size_t>(SessionRefusal::kCount)> refused{};
};

}  // namespace deltamesh
