// The state behind RouterCore, split over three sources by what they do: router_core.cc (life and
// ends of requests, lost workers, time), router_placement.cc (admission and placement),
// router_messages.cc (what workers say).
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "services/router/membership.h"
#include "services/router/prefix_feed.h"
#include "services/router/router_core.h"

namespace deltamesh {

enum class RequestPhase {
  kWaiting,   // in the queue: no worker has room
  kLanding,   // the decode worker was asked, its landing is awaited
  kHandoff,   // the prefill worker was asked, the decode worker's verdict is awaited
  kDecoding,  // tokens are awaited
};

// A request's life in the mesh. `decode` and `prefill` are 0 when none is assigned; what was
// charged to them is given back exactly once, through Impl::ReleaseDecode and Impl::ReleasePrefill.
struct RouterRequest {
  ClientRequest spec;
  absl::Time deadline;
  absl::Time phase_since;    // progress within the phase counts as a new start
  absl::Time waiting_since;  // a refusal for want of room does not start the wait anew
  RequestPhase phase = RequestPhase::kWaiting;
  uint32_t attempt = 0;
  uint32_t refused_attempt = 0;  // of this placement, the hand-off refused last; 0: none
  int64_t handoff_failures = 0;
  int64_t handoff_tokens = 0;
  LinkId decode = 0;
  LinkId prefill = 0;
  std::string decode_name, prefill_name;  // of the last assigned; also after they are gone
  LinkId sender = 0;                      // who was last asked to prefill; for its report only
  int64_t decode_blocks = 0, decode_tokens = 0;  // charged
  int64_t prefill_blocks = 0, prefill_tokens = 0;
  std::string avoid_prefill;  // the worker whose hand-off failed last
  std::optional<absl::Time> prefill_gave_up;
  absl::Status prefill_status;
  int64_t delivered = 0;
  int64_t cached_tokens = 0;
  std::vector<uint64_t> keys;  // of the prompt's blocks before its last token; empty: not cached

  int64_t prompt_tokens() const { return static_cast<int64_t>(spec.prompt.size()); }
};

class RouterCore::Impl {
 public:
  explicit Impl(RouterOptions o) : options(std::move(o)), members(&options, &counters, &actions) {}

  absl::Status Submit(ClientRequest spec, absl::Time now);
  // Frees a request without a word to the client.
  bool Cancel(const RequestId& id, bool complete, absl::Time now);
  void OnMessage(LinkId link, const mesh::WorkerMessage& message, absl::Time now);
  void LoseWorker(const LostWorker& lost, const absl::Status& why, absl::Time now);
  void Tick(absl::Time now);
  void PlaceWaiting(absl::Time now);
  int64_t ContextTokens() const;
  absl::Status Ready() const;

  RouterOptions options;
  RouterCounters counters;
  std::vector<RouterAction> actions;
  mutable Membership members;
  std::map<RequestId, RouterRequest> requests;  // ordered: what happens must not depend on a hash
  std::deque<RequestId> waiting;                // first come, first placed
  PrefixFeed prefixes;
  double handoff_bytes_per_second = 0;  // learned; 0: unknown
  uint32_t next_attempt = 1;

 private:
  enum class Placed { kYes, kNoRoom, kEnded };

  // Messages of registered workers.
  void OnRegister(LinkId link, const mesh::Register& message, absl::Time now);
  void OnLanding(const Worker& from, const mesh::LandingGranted& message, absl::Time now);
  void OnHandoffResult(const Worker& from, const mesh::HandoffResult& message, absl::Time now);
  void OnPrefillFinished(const Worker& from, const mesh::PrefillFinished& message);
  void OnOutput(const Worker& from, const mesh::SequenceOutput& output, absl::Time now);
  void OnRequestFailed(const Worker& from, const mesh::RequestFailed& message, absl::Time now);
  void OnPrefillGaveUp(RouterRequest& r, const absl::Status& why, absl::Time now);

  // Placement.
  Placed TryPlace(RouterRequest& r, absl::Time now);
  // What workers hold of the request's prompt, by link.
  using Held = std::map<LinkId, IndexMatch>;
  Held FindHeld(const RouterRequest& r) const;
  void NamePrefixes(RouterRequest& r) const;
  // Assigns a prefill worker; its estimated seconds, nothing when none has room.
  std::optional<double> ChoosePrefill(RouterRequest& r, int64_t position, const Held& held);
  struct DecodeChoice {
    Worker* worker;
    RequestShape shape;
    double seconds;
  };
  // With `handoff`: the state comes from a prefill worker. Else only workers that hold a snapshot of the
  // prompt, or with `anyone` all, compute what it lacks.
  std::optional<DecodeChoice> ChooseDecode(const RouterRequest& r, int64_t position, bool handoff,
                                           bool anyone, const Held& held);
  bool FitsAStep(const DecodeChoice& choice) const;
  std::vector<WorkerLoad> LoadsOf(const std::vector<Worker*>& workers);
  void OnPrefixes(const Worker& from, const mesh::PrefixChanges& message);
  void AskPrefixes(LinkId link);
  void SendStartDecode(const RouterRequest& r);
  void SendStartPrefill(RouterRequest& r, const mesh::Landing& landing, absl::Time now);
  void SendCancel(LinkId link, const RequestId& id);
  // Frees the request everywhere and puts it first in the queue.
  void Requeue(RouterRequest& r, absl::Time now);
  // The same for a request that `full` had no room for: it has waited since before.
  void WaitForRoom(RouterRequest& r, LinkId full, absl::Time now);
  void FailWaiting(RouterRequest& r);
  // Counts a failed hand-off. False: that was the last one and the request has ended with `why`.
  bool CountHandoffFailure(RouterRequest& r, const absl::Status& why);

  // Ends.
  void Finish(RouterRequest& r, mesh::SequenceOutput::End end);
  void Fail(RouterRequest& r, const absl::Status& status);
  void ReleaseDecode(RouterRequest& r);
  void ReleasePrefill(RouterRequest& r);
  void Erase(RouterRequest& r);

  RouterRequest* Find(const RequestId& id) {
    const auto it = requests.find(id);
    return it == requests.end() ? nullptr : &it->second;
  }
  void CountReason(const std::string& name);
  int64_t BlockTokens() const;
};

}  // namespace deltamesh
