// The sessions of a router and what clients ask of them: looks into the table, and where that does not
// suffice asks workers, one exchange after the other.
//
//   kGet, kResume, kOpen, kFork of a session that is not in the table: every worker with a store is asked for
//     its record; the newest good one counts. kResume and kOpen then put it into the table and have one
//     worker load its state; without that state (none is stored, it does not load) the tokens still serve.
//   kSuspend: the worker that holds the deepest snapshot writes it and the record; then the table forgets it.
//   kFork: unless it may replace, every store is asked whether it knows the new name.
//   A session that nobody has is NOT_FOUND only when every store that this router knows says so. While one of
//     them is away (until it is forgotten: KnownStores), or without any worker, it is UNAVAILABLE; and in the
//     router's first kYoung, in which its workers come back to it, the answer waits for the end of these:
//     clients begin a conversation anew when they hear NOT_FOUND.
//   A record in a store follows its session (record_follower.h): never does an older one come back. What came
//     into the table while a record was read or loaded is newer than it, and counts.
//
// Two routers do not tell each other what was said: all turns of a session must go to one router, for as long
// as that one lives or until it suspended the session.
//
// Every call is answered exactly once, by a SessionAnswered action. Commands carry numbers that are never
// used twice; a reply under any number but the awaited one is stale.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "deltamesh/mesh/session.pb.h"
#include "services/router/membership.h"
#include "services/router/prefix_feed.h"
#include "services/router/record_follower.h"
#include "services/router/router_core.h"
#include "services/router/session_stores.h"
#include "services/router/session_types.h"

namespace deltamesh {

class SessionCalls {
 public:
  static constexpr absl::Duration kYoung = kRedialMax;

  // All must outlive this.
  SessionCalls(const RouterOptions* options, RouterCounters* counters, Membership* members,
               const PrefixFeed* prefixes, std::vector<RouterAction>* actions);

  // The session's newest turn ended.
  void Keep(const SessionId& id, const std::string& salt, const RequestId& turn,
            std::vector<TokenId> tokens, bool ended, absl::Time now);
  // Leaves at most `tokens` of it, if it still is what that turn left.
  void Trim(const SessionId& id, const RequestId& turn, int64_t tokens, absl::Time now);
  // `running`: a turn of the session is being answered; `target_running`: one of the fork's.
  void Start(SessionCall call, bool running, bool target_running, absl::Time now);
  // The client left: answered with CANCELLED.
  void Cancel(const RequestId& id, absl::Time now);

  void OnJoined(const mesh::Register& worker);
  void OnReply(LinkId link, const mesh::SessionReply& reply, absl::Time now);
  void OnLost(LinkId link, const std::string& name, const absl::Status& why, absl::Time now);
  void Tick(absl::Time now);

  const SessionTable& table() const { return table_; }
  const KnownStores& stores() const { return known_stores_; }
  int64_t live() const { return static_cast<int64_t>(calls_.size()); }
  // Sessions of which a store may have an older record, until it has this one.
  int64_t unsettled() const { return follower_.unsettled(); }

 private:
  enum class Phase { kReading, kReadingTarget, kWriting, kLoading };
  struct Call {
    SessionCall spec;
    bool running = false;
    Phase phase = Phase::kReading;
    uint64_t number = 0;  // of the commands that are out
    std::set<LinkId> asked;
    absl::Time phase_end;
    bool waiting = false;  // for the end of kYoung, then it reads again
    uint64_t newest = 0;   // stored of the session, as known when the reading began
    uint64_t stores = 0;   // that had joined then
    absl::Status refused;  // a record was, the last one
    std::string lost;      // a worker that did not answer
    // Workers that could not read a tier of theirs which may have a newer record; and whether another read
    // the bucket.
    std::string disk_unread, bucket_unread;
    bool bucket_read = false;
    const std::string& Unread() const { return disk_unread.empty() ? bucket_unread : disk_unread; }
    uint64_t version = 0;  // kWriting: of the entry
    uint64_t stamp = 0;    // kWriting: of the record
    std::optional<mesh::SessionRecord> record;
    std::string read_from, read_tier;  // the worker that has the record, and where
    SessionState state;                // what is to be answered
  };

  absl::Status CheckRoom(const Call& call) const;
  void AnswerKnown(Call& call, const Session& session, absl::Time now);
  void Suspend(Call& call, const Session& session, absl::Time now);
  void Fork(Call& call, absl::Time now);
  void PutFork(Call& call, bool asked, absl::Time now);
  void Read(Call& call, Phase phase, const SessionId& session, absl::Time now);
  void OnRead(Call& call, const Worker& from, const mesh::SessionReply& reply, absl::Time now);
  // Every store has answered, is lost or had its time.
  void ReadEnded(Call& call, absl::Time now);
  void NotFound(Call& call, absl::Time now);
  void Found(Call& call, absl::Time now);
  // Brings the state of a session in the table into memory, or answers when there is nothing to bring.
  void Load(Call& call, absl::Time now);
  void OnWritten(Call& call, const Worker& from, const mesh::SessionReply& reply, absl::Time now);
  void OnLoaded(Call& call, const Worker& from, const mesh::SessionReply& reply, absl::Time now);

  std::vector<SessionHolding> HoldersOf(const std::string& salt, const SessionTokens& tokens) const;
  mesh::SessionCommand Command(Call& call, const SessionId& session);
  void Send(LinkId link, mesh::SessionCommand command);
  void GiveUpWriting(const Call& call, absl::Time now);
  bool IsSuspending(const SessionId& id) const;
  bool IsOpening(const Call& but) const;

  // False, and refused: the record is older than one that this router knows of.
  bool CheckNewest(Call& call, absl::Time now);
  void TakeNewer(Call& call);
  void ForgetStores(absl::Time now);
  void Answer(Call& call);
  void Refuse(Call& call, SessionRefusal why, const absl::Status& status);
  void Count(SessionRefusal why) { ++counters_->sessions.refused[static_cast<size_t>(why)]; }

  const RouterOptions* const options_;
  RouterCounters* const counters_;
  Membership* const members_;
  const PrefixFeed* const prefixes_;
  std::vector<RouterAction>* const actions_;
  SessionTable table_;
  std::map<RequestId, Call> calls_;
  std::map<uint64_t, RequestId> by_number_;
  uint64_t next_number_ = 1;
  KnownStores known_stores_;
  absl::Time young_until_ = absl::InfinitePast();
  bool ticked_ = false;
  RecordFollower follower_;  // uses what is above
};

}  // namespace deltamesh
