// A worker's side that holds states: sends a snapshot of its prefix cache, and the latents that the asking
// worker lacks, into the landing that was granted there. A state that only its disk has is read first, as for
// a prompt of its own: within the tier's bounds and deadline. Meanwhile the asking worker hears that this one
// lives; when nothing comes of it, it is told so.
//
// What is sent is held by counted references from the question to the end of the transfer, whatever the cache
// drops meanwhile. It refuses by name what it does not hold (any more), what was meant for an earlier life of
// it or for another model, and what is beyond its bound.
//
// Not thread-safe: part of a core.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/cache/prefix_cache.h"
#include "runtime/transfer/incoming_state.h"
#include "services/worker/fetch_client.h"
#include "services/worker/metric_list.h"
#include "services/worker/state_tier.h"
#include "services/worker/transfer_ends.h"

namespace deltamesh {

class FetchServer {
 public:
  // `cache` may be null: then nothing is held; so may `tier`. Nothing is owned; all must outlive this.
  FetchServer(const FetchOptions& options, const PrefixCache* cache, StateTier* tier,
              const mesh::Register* registration, const TransferEnds& ends)
      : options_(options), cache_(cache), tier_(tier), registration_(registration), ends_(ends) {}

  void OnAsked(const FetchAsked& asked, absl::Time now);
  // False: the transfer is none of these.
  bool OnHandoffSent(const HandoffSent& sent);
  // Gives the sender more of what it is to send, between two steps of the engine. True: there is yet more.
  // The tier must have been polled.
  bool Step(absl::Time now);

  int64_t open() const { return static_cast<int64_t>(open_.size()); }
  void AddMetrics(MetricList& list) const;

 private:
  struct Sending {
    PrefixKey key;
    PeerId peer = 0;
    mesh::Landing landing;  // whose, for a refusal
    StateLoadRef load;      // the disk reads it; then nothing is held yet
    StagedSnapshot held;
    int64_t next_block = 0;  // all before it were given, or are held there
    int64_t next_layer = 0;  // of the snapshot: all before it were given
    bool given = false;      // all of it
  };

  // `stored_path` of a state that is to be read from the disk; empty: it is in memory.
  Refusal Check(const mesh::StateFetch& fetch, std::vector<PrefixKey>* stored_path) const;
  Refusal Send(const FetchAsked& asked, absl::Time now);
  // Tells who asked, and counts.
  void Refused(PeerId peer, const mesh::Landing& landing, const std::string& transfer,
               const Refusal& refusal);
  // Goes on with what has been read. False: it came to nothing, and who asked was told.
  bool TakeLoaded(const std::string& transfer, Sending& sending);
  int64_t Give(const std::string& transfer, Sending& sending, int64_t budget);

  const FetchOptions options_;
  const PrefixCache* const cache_;
  StateTier* const tier_;
  const mesh::Register* const registration_;
  const TransferEnds ends_;
  std::map<std::string, Sending> open_;  // by the name of the transfer; few
  std::map<std::string, uint64_t> results_;
  uint64_t bytes_ = 0, loaded_ = 0;
};

// Tells whoever an event of the port is for.
void HandleFetchEvent(const FetchEvent& event, absl::Time now, FetchClient& client,
                      FetchServer& server);

}  // namespace deltamesh
