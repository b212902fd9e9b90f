// Routed experts computed by shards: dispatch over the Transport, answers back by (token, rank).
//
// Each row goes once to each shard that hosts one of its experts; with replicas, all rows of an
// expert go to the one that has the fewest rows of this batch so far. The answer is unweighted
// rows, so the bits are those of LocalExperts whatever the number of shards.
//
// Nothing lands in the caller's memory: answers arrive in buffers of their call and are copied in
// Finish. A call that was given up leaves its buffers to the transport until that is done with
// them.
//
// Threads: Start and Finish belong to the thread that runs the model, which drives the transport while it
// waits in Finish; SetView, complete and stats may be called on any thread; the rest runs where the
// transport runs handlers. No lock is held while sending or driving.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "runtime/expert/backend.h"
#include "runtime/transfer/transport.h"

namespace deltamesh {

// One process that hosts experts.
struct ExpertShardInfo {
  std::string name{};
  uint64_t epoch = 0;
  std::string address;           // of its transport
  std::vector<int32_t> experts;  // hosted, in every MoE layer

  friend bool operator==(const ExpertShardInfo&, const ExpertShardInfo&) = default;
};

struct ExpertView {
  uint64_t epoch = 0;  // grows with each change
  std::vector<ExpertShardInfo> shards;
};

struct RemoteExpertsOptions {
  std::string caller{};                        // this worker's name
  std::string model_digest{};                  // a shard with another one refuses
  int64_t experts = 0;                         // per layer, whole model
  int64_t width = 0;                           // values per row
  absl::Duration deadline = absl::Seconds(5);  // from Finish's begin to the last answer
  // For transports that move only when driven: called while waiting, returns false when nothing
  // moved. Null: Transport::Drive, or wait for the transport's thread.
  std::function<bool()> pump{};
};

struct RemoteExpertsStats {
  uint64_t calls = 0;    // sent
  uint64_t rows = 0;     // sent
  uint64_t answers = 0;  // accepted
  uint64_t refused = 0;  // calls that a shard refused, or answered with another shape or epoch
  uint64_t corrupt = 0;  // answers whose checksum did not match
  uint64_t ignored = 0;  // answers to no open call: late, doubled, or from a peer never asked
  uint64_t lost = 0;     // calls whose shard was lost
  uint64_t expired = 0;  // calls without an answer within the deadline
};

class RemoteExperts final : public ExpertBackend, public MessageHandler {
 public:
  // Registers itself for kExpertCombine; must outlive `transport`'s activity as handlers must.
  RemoteExperts(Transport* transport, RemoteExpertsOptions options);
  ~RemoteExperts() override;

  // Takes effect with the next Start; shards that left keep their connection until no ticket is
  // open. A view with a smaller epoch is ignored.
  void SetView(ExpertView view);
  // Whether the latest view puts every expert on some shard.
  bool complete() const;
  RemoteExpertsStats stats() const;

  absl::StatusOr<uint64_t> Start(const ExpertBatch& batch) override;
  absl::Status Finish(uint64_t ticket) override;
  // Each shard is told with its next call. Of many at once, the last kNotedRequestsMax.
  void Note(const RequestId& request) override;

  absl::StatusOr<PayloadTarget> OnMessage(const Arrival& arrival) override;
  void OnPeerLost(PeerId peer, const absl::Status& reason) override;

 private:
  struct Table;
  struct Call;
  struct Draft;
  struct Ticket {
    ExpertBatch batch;
    std::vector<std::shared_ptr<Call>> calls;
  };

  std::shared_ptr<Table> Enter();
  void Leave();
  absl::StatusOr<std::vector<Draft>> Route(Table& table, const ExpertBatch& batch);
  absl::StatusOr<size_t> ChooseShard(Table& table, int32_t expert, int64_t layer,
                                     const std::vector<int64_t>& load);
  absl::Status Reconnect(Table& table, size_t shard);
  std::shared_ptr<Call> Open(Table& table, const ExpertBatch& batch, Draft draft);
  void Send(const std::shared_ptr<Call>& call, const ExpertBatch& batch);
  absl::Status Wait(const Ticket& ticket);
  absl::Status Check(const Ticket& ticket, bool& open) const;
  absl::Status Collect(const Call& call, const ExpertBatch& batch);
  // These want the mutex held.
  bool Settled(const Ticket& ticket) const;
  void Settle(Call& call, absl::Status status, uint64_t RemoteExpertsStats::*counter);
  bool MarkLost(PeerId peer);  // whether a table used it
  std::vector<RequestId> TakeUntold(uint64_t& told) const;

  Transport* const transport_;
  const RemoteExpertsOptions options_;

  std::mutex view_mutex_;  // one SetView at a time; taken before mutex_
  mutable std::mutex mutex_;
  const Ticket* awaited_ = nullptr;                  // by Wait
  std::condition_variable settled_;                  // `awaited_` has all its answers, or an error
  std::shared_ptr<Table> table_;                     // never null
  std::shared_ptr<Table> next_table_;                // while SetView connects its shards, or null
  int64_t connecting_ = 0;                           // Connects under way
  std::vector<PeerId> lost_;                         // told lost during them
  std::vector<PeerId> retired_;                      // to be disconnected when no ticket is open
  int64_t entered_ = 0;                              // Starts under way and open tickets
  std::map<uint64_t, std::shared_ptr<Call>> calls_;  // open, by call id
  std::map<uint64_t, Ticket> tickets_;
  std::deque<RequestId> noted_;  // the newest, in order
  uint64_t noted_end_ = 0;       // how many there ever were
  uint64_t next_call_ = 1;
  uint64_t next_ticket_ = 1;
  RemoteExpertsStats stats_;
};

}  // namespace deltamesh
