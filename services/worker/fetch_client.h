// A worker's side that wants states: of a prompt that it is to compute it fetches the beginning from the
// worker that the router named, into a landing of its own, so that a fetch is checked as any hand-off is.
//
// Whatever goes wrong - nobody there, not held, stale, foreign, damaged, silent, late, no room - has a name,
// is counted, told to the router, and ends the fetch without a state; the prompt is computed then. Waits are
// bounded three times: for the manifest, for silence after it, and in all.
//
// Not thread-safe: part of a core.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/transfer/incoming_state.h"
#include "services/worker/metric_list.h"
#include "services/worker/prefix_keeper.h"
#include "services/worker/request_table.h"
#include "services/worker/transfer_ends.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

struct FetchOptions {
  int64_t open_max = 4;  // fetched here at once, and sent from here to others at once; 0: none
  absl::Duration claim_max = kHandoffIdleMax;  // from asking to the manifest
  absl::Duration whole_max = absl::Seconds(30);
  // Of states sent from here, whose checksums are computed between two steps of the engine, which wait for
  // that. A block or a layer that was begun is finished.
  int64_t bytes_per_step = int64_t{32} << 20;
};

struct FetchEnded {
  RequestId request;
  std::unique_ptr<SequenceState> state;  // null: it was refused
};
enum class FetchBegun {
  kAsked,
  kNotNeeded,  // as much is here
  kRefused,    // for a reason that was counted and told
};

class FetchClient {
 public:
  // Nothing is owned; all must outlive this.
  FetchClient(const FetchOptions& options, const StatePools& pools, PrefixKeeper* prefixes,
              const TransferEnds& ends, WorkerLinks* links)
      : options_(options), pools_(pools), prefixes_(prefixes), ends_(ends), links_(links) {}

  // Asks for the state, with room for `tokens` positions in all, and sets request->fetching if it did.
  FetchBegun Begin(AdmittedRequest* request, const KeptPrompt& prompt,
                   const mesh::FetchSource& source, int64_t tokens, absl::Time now);
  // Nobody wants it any more. Unknown requests are ignored.
  void Cancel(const RequestId& request);

  // False: the event is of no fetch that is open.
  bool OnHandoffEvent(HandoffEvent& event, absl::Time now);
  void OnRefused(const FetchRefused& event, absl::Time now);
  void OnPeerLost(const FetchPeerLost& event, absl::Time now);
  void Tick(absl::Time now);

  // Those that ended since the last call; cancelled ones are not among them.
  std::vector<FetchEnded> TakeEnded() { return std::exchange(ended_, {}); }

  int64_t open() const { return static_cast<int64_t>(open_.size()); }
  void AddMetrics(MetricList& list) const;

 private:
  struct Fetch {
    RequestId request;
    LinkId link = 0;
    uint32_t attempt = 0;
    std::string source;
    uint64_t transfer_id = 0, token_low = 0;
    PeerId peer = 0;
    int64_t position = 0;
    absl::Time began, deadline;
  };
  using FetchIterator = std::map<std::string, Fetch>::iterator;

  Refusal Ask(const std::string& transfer, const AdmittedRequest& request, const KeptPrompt& prompt,
              const mesh::FetchSource& source, int64_t tokens, Fetch* fetch);
  void End(FetchIterator it, const Refusal& refusal, std::unique_ptr<SequenceState> state,
           uint64_t bytes, double transfer_seconds, absl::Time now);
  void Tell(const Fetch& fetch, const Refusal& refusal, uint64_t bytes, double transfer_seconds,
            absl::Time now);

  const FetchOptions options_;
  const StatePools pools_;
  PrefixKeeper* const prefixes_;
  const TransferEnds ends_;
  WorkerLinks* const links_;
  std::map<std::string, Fetch> open_;  // by the name of the transfer; few
  absl::flat_hash_map<RequestId, std::string> by_request_;
  std::vector<FetchEnded> ended_;
  uint64_t next_ = 1;
  std::map<std::string, uint64_t> results_;  // by name
  uint64_t bytes_ = 0, tokens_ = 0;          // of complete ones
  double seconds_ = 0;
};

}  // namespace deltamesh
