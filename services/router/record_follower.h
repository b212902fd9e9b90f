// Keeps what lies in stores under sessions' names no older than what was said in them.
//
//   A session with a record: after every change its tokens are written anew, without its state. A write that
//     fails is tried again, later and later, for as long as the session lives.
//   A session that was begun without asking for its record (a turn that is not appended, a fork that
//     replaces): every store is asked whether it has one of that name. The session goes on from the newest
//     one's time, so that an older conversation never comes back in its place; without any, nothing is
//     written. With its next change, or before it is forgotten, they are asked again when a store joined
//     since: that one may have been away.
//
// Until that is done a session is unsettled. One that the table forgets for room meanwhile stays here with
// its tokens, within kEvictedMax and as many bytes as the table may have, and comes back when it is called.
// Beyond these it is lost: counted, said in the log, and what a store has of it from before is refused for as
// long as the router lives (the first kLostMax of them).
//
// The newest record of each session that this router wrote or saw is remembered by its time
// (record_stamps.h): an older one is refused while the worker that has the newest is away, and what is begun
// anew meanwhile is written as later than it.
//
// What this cannot know: records that this router never saw, of a store whose worker is away from when the
// name is begun until the session is forgotten here, and comes back with no newer one beside it; what was
// said last before the router itself is lost; and what other routers do. A session's turns belong to one
// router: two that serve the same name each go on with the tokens they have.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "deltamesh/mesh/session.pb.h"
#include "services/router/membership.h"
#include "services/router/record_stamps.h"
#include "services/router/router_core.h"
#include "services/router/session_table.h"

namespace deltamesh {

class RecordFollower {
 public:
  static constexpr size_t kAtOnceMax = 64;     // sessions whose stores are asked or written to
  static constexpr size_t kEvictedMax = 1024;  // sessions that are here and not in the table
  static constexpr size_t kLostMax = size_t{1} << 16;
  static constexpr absl::Duration kRetryFirst = absl::Seconds(1), kRetryMax = absl::Minutes(1);

  // All must outlive this. `next_number` is shared with whoever else sends commands.
  RecordFollower(const RouterOptions* options, RouterCounters* counters, Membership* members,
                 std::vector<RouterAction>* actions, SessionTable* table, uint64_t* next_number);

  // The session's content changed, or what is known of its record; or it is gone from the table by intent.
  void Changed(const SessionId& id, absl::Time now);
  // What a store has of it will be written by another: nothing of ours must come later.
  void Drop(const SessionId& id);
  // What it has was not asked for.
  void OnStoreJoined() { ++stores_joined_; }
  uint64_t stores_joined() const { return stores_joined_; }
  // The table had no room for it.
  void OnEvicted(const SessionId& id, const Session& session);
  // Before the session is looked for in the table: puts it back there if it is here.
  void Restore(const SessionId& id);
  // A record of that time is older than what was said and then lost here.
  bool IsOutdated(const SessionId& id, uint64_t stamp) const;
  // A record of the session is in some store; the newest one's time, 0: none is known.
  void Note(const SessionId& id, uint64_t stamp) { stamps_.Note(id, stamp); }
  uint64_t NewestStored(const SessionId& id) const { return stamps_.Of(id); }

  // False when it is no answer to a command of this.
  bool OnReply(LinkId link, const mesh::SessionReply& reply, absl::Time now);
  void OnLost(LinkId link, absl::Time now);
  void Tick(absl::Time now);

  int64_t unsettled() const { return static_cast<int64_t>(tasks_.size()); }

  mesh::SessionRecord MakeRecord(const SessionId& id, const Session& session, absl::Time now) const;

 private:
  struct Task {
    std::optional<Session> evicted;  // the table has it no more
    uint64_t number = 0;             // of the commands that are out; 0: none are
    std::set<LinkId> asked;
    bool writing = false;  // else reading
    absl::Time at;         // ends what is out, or begins the next
    int failures = 0;
    // Writing: of the session as it was written. Reading: the newest record, and whether one did not say.
    uint64_t version = 0;
    std::optional<StoredRecord> found;
    std::vector<TokenId> found_tokens;  // up to its position
    bool silent = false;
    uint64_t stores = 0;  // that had joined when it began to read
  };
  using Tasks = std::map<SessionId, Task>;

  const Session* Content(const SessionId& id, const Task& task) const;
  bool HasNone(const Session& session) const;
  void SetAt(const SessionId& id, Task& task, absl::Time at);
  void Erase(Tasks::iterator it);
  void Begin(Tasks::iterator it, absl::Time now);
  void BeginRead(const SessionId& id, Task& task, absl::Time now);
  void BeginWrite(const SessionId& id, Task& task, const Session& session, absl::Time now);
  mesh::SessionCommand Command(const SessionId& id, Task& task, absl::Time now);
  void Send(LinkId link, const mesh::SessionCommand& command);
  void EndCommand(Task& task);
  void OnRead(Tasks::iterator it, const Worker& from, const mesh::SessionReply& reply,
              absl::Time now);
  void ReadEnded(Tasks::iterator it, absl::Time now);
  void WriteEnded(Tasks::iterator it, const absl::Status& status, absl::Time now);
  void Failed(Tasks::iterator it, const absl::Status& why, absl::Time now);
  void Lose(const SessionId& id, const Session& session);
  void Pump(absl::Time now);

  const RouterOptions* const options_;
  RouterCounters* const counters_;
  Membership* const members_;
  std::vector<RouterAction>* const actions_;
  SessionTable* const table_;
  uint64_t* const next_number_;
  Tasks tasks_;
  std::set<std::pair<absl::Time, SessionId>> due_;
  std::map<uint64_t, SessionId> by_number_;
  size_t evicted_ = 0;  // tasks that hold their session
  int64_t evicted_bytes_ = 0;
  RecordStamps stamps_;
  uint64_t stores_joined_ = 1;  // and one: 0 is never asked
  absl::Time now_ = absl::InfinitePast();
  absl::flat_hash_map<SessionId, uint64_t> lost_;  // the time of what was lost
};

}  // namespace deltamesh
