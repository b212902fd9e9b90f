// A worker's answers to SessionCommands: turns each into calls of the store and those into one reply.
//
// Commands end with their deadline or their link, whatever the store does after that; there are at most
// kCommandsMax at once, those counted that the store still has and nobody waits for.
//
// Not thread-safe: part of a core.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/prefix/prefix_key.h"
#include "services/worker/metric_list.h"
#include "services/worker/session_store.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

class SessionDesk {
 public:
  static constexpr size_t kCommandsMax = 256;

  // `store` may be null: every command is refused. Not owned, as `links`; both must outlive this.
  SessionDesk(SessionStore* store, WorkerLinks* links);

  void OnCommand(LinkId link, const mesh::SessionCommand& command, absl::Time now);
  void OnLinkClosed(LinkId link);
  // Answers what is done. After routers were told of changed prefixes.
  void Step(absl::Time now);

  bool idle() const { return commands_.empty(); }
  void AddMetrics(MetricList& list) const;

 private:
  enum class Phase { kState, kRecord };
  struct Command {
    LinkId link = 0;
    mesh::SessionCommand message;
    absl::Time deadline;
    Phase phase = Phase::kState;
    bool record_alone = false;
    std::vector<PrefixKey> path;
    mesh::SessionReply reply;
  };

  void OnDone(SessionStoreDone done);
  // Nobody waits for the command any more; the store has it.
  void Abandon(uint64_t ticket);
  void PutRecord(uint64_t ticket, Command& command, const SessionStoreDone& done);
  void PutRecordAlone(uint64_t ticket, Command& command);
  std::vector<PrefixKey> PathOf(const std::string& salt,
                                const google::protobuf::RepeatedField<int32_t>& tokens) const;
  void Fail(LinkId link, uint64_t call, const absl::Status& status);
  void Send(LinkId link, mesh::SessionReply reply);

  SessionStore* const store_;
  WorkerLinks* const links_;
  const std::string model_;
  std::map<uint64_t, Command> commands_;  // by ticket
  size_t abandoned_ = 0;                  // and not answered yet
  uint64_t next_ticket_ = 1;
  uint64_t suspended_ = 0, recorded_ = 0, loaded_ = 0, read_ = 0, failed_ = 0, late_ = 0;
};

// "session-", the id's first 8 bytes (its tenant's) as hexadecimal digits, "-", and the others: what a
// session's record is called in a store, where those of a tenant are a group (record_file.h).
std::string SessionRecordName(const std::string& id);

}  // namespace deltamesh
