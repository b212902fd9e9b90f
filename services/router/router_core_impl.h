// The state behind RouterCore, split over sources by what they do: router_core.cc (life and ends of
// requests, lost workers, time), router_admission.cc (who is taken in, whose turn it is),
// router_placement.cc (which workers), router_fetch.cc
// (what they fetch from others), router_messages.cc (what workers say).
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "services/router/decision_log.h"
#include "services/router/drain_rate.h"
#include "services/router/fair_queue.h"
#include "services/router/link_rates.h"
#include "services/router/membership.h"
#include "services/router/policy.h"
#include "services/router/prefix_feed.h"
#include "services/router/recent_mean.h"
#include "services/router/router_core.h"
#include "services/router/session_calls.h"
#include "services/router/usual_overhead.h"

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
  absl::Time submitted;
  absl::Time phase_since;  // progress within the phase counts as a new start
  absl::Time placed;       // the last time
  std::optional<double>
      estimated;  // seconds from then to the first token, by rates; nothing: none is known
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
  size_t decode_named = 0, prefill_named = 0;  // of `keys`: Room.named
  LinkId fetch_from = 0;  // who computes the prompt is to fetch from there; 0: from nobody
  int64_t fetch_tokens = 0;
  std::vector<LinkId> fetched_in_vain;  // from these; at most kFetchTriesMax
  std::string avoid_prefill;            // the worker whose hand-off failed last
  std::optional<absl::Time> prefill_gave_up;
  absl::Status prefill_status;
  int64_t delivered = 0;
  bool fills_context = false;  // spec.max_tokens is what fits, not what was asked for
  uint64_t turn = 0;           // a larger one than what began before has
  bool overtaken = false;      // see ClientFinished
  std::vector<TokenId> said;   // the delivered tokens, of a session's turn
  int64_t cached_tokens = 0;
  int64_t cost = 0;  // in the queue: tokens to compute, as estimated; 0 once it was placed
  // The last try to place it: what it depends on has not changed since while these are the same.
  uint64_t tried_room = 0;
  bool tried_without_prefill = false;  // it was not to have a prefill worker then
  bool lacked_prefill = false;         // and would have found room at a decode worker
  absl::Time looked_up = absl::InfinitePast();
  uint64_t looked_up_version = 0;
  std::map<LinkId, IndexMatch> held;  // what workers have of the prompt, as of then
  DecisionLog::Ticket decision = 0;
  std::vector<uint64_t> keys;  // of the prompt's blocks before its last token; empty: not cached
  std::string affinity;        // RequestShape's, which points here; as of so many keys:
  size_t keys_named = 0;

  int64_t prompt_tokens() const { return static_cast<int64_t>(spec.prompt.size()); }
};

class RouterCore::Impl {
 public:
  explicit Impl(RouterOptions o)
      : options(std::move(o)),
        members(&options, &counters, &actions),
        decisions(options.decisions_max),
        waiting({.turn_tokens = options.turn_tokens, .ageing_max = options.ageing_max}),
        sessions(&options, &counters, &members, &prefixes, &actions) {}

  absl::Status Submit(ClientRequest spec, absl::Time now);
  // Frees a request without a word to the client.
  // A client that got what it wanted took `taken` tokens of the answer; nothing: it left.
  bool Cancel(const RequestId& id, std::optional<int64_t> taken, absl::Time now);
  void TurnAway(const RefusedRequest& refusal, absl::Time now);
  void CallSession(SessionCall call, absl::Time now);
  void OnMessage(LinkId link, const mesh::WorkerMessage& message, absl::Time now);
  void LoseWorker(const LostWorker& lost, const absl::Status& why, absl::Time now);
  void Tick(absl::Time now);
  void PlaceWaiting(absl::Time now);
  // Most tokens of one sequence that a decode worker can hold.
  struct Contexts {
    int64_t live = 0;  // any of them
    int64_t open = 0;  // one that takes new requests: it does not drain
  };
  Contexts DecodeContexts() const;
  absl::Status Ready() const;
  // Until waiting requests that cost this much have their place; zero: not known.
  absl::Duration DrainTime(int64_t tokens) const;
  absl::Duration RetryAfter(int64_t tokens) const;

  RouterOptions options;
  RouterCounters counters;
  std::vector<RouterAction> actions;
  std::vector<FetchSeen> fetches_seen;  // at most kFetchesSeenMax
  mutable Membership members;
  std::map<RequestId, RouterRequest> requests;  // ordered: what happens must not depend on a hash
  DecisionLog decisions;
  RouterCore::Concluded concluded;
  FairQueue waiting;
  DrainRate drain;
  double answer_tokens = 256;                      // how long answers are, mostly of late
  RecentMean answer_seconds, first_token_seconds;  // from the placement, and no try lost before
  PrefixFeed prefixes;
  SessionCalls sessions;
  LinkRates links;
  UsualOverhead handing_over, staying;
  uint32_t next_attempt = 1;
  uint64_t next_turn = 1;
  absl::Time time;  // of the call in progress

 private:
  // kNoPrefill: a decode worker has room, and no prefill worker that the request waits for. kNoRoom: nobody
  // who could take it has.
  enum class Placed { kYes, kNoRoom, kNoPrefill, kEnded };

  // Messages of registered workers.
  void OnRegister(LinkId link, const mesh::Register& message, absl::Time now);
  void OnLanding(const Worker& from, const mesh::LandingGranted& message, absl::Time now);
  void OnHandoffResult(const Worker& from, const mesh::HandoffResult& message, absl::Time now);
  void OnPrefillFinished(const Worker& from, const mesh::PrefillFinished& message);
  void LearnFirstToken(const RouterRequest& r, absl::Time now);
  void LearnAnswer(const RouterRequest& r, absl::Time now);
  void OnOutput(const Worker& from, const mesh::SequenceOutput& output, absl::Time now);
  void OnRequestFailed(const Worker& from, const mesh::RequestFailed& message, absl::Time now);
  void OnPrefillGaveUp(RouterRequest& r, const absl::Status& why, absl::Time now);
  // The decode worker did not get what it was chosen for: the request is placed anew.
  void OnFetchGaveUp(RouterRequest& r, absl::Time now);

  // Placement.
  struct Placing {
    bool prefill = true;  // it may go to a prefill worker; else it is as if none had room
  };
  Placed TryPlace(RouterRequest& r, const Placing& how, absl::Time now);
  absl::Status CheckQueue(const RouterRequest& r) const;
  int64_t CostOf(const RouterRequest& r) const;
  void BoundBreakpoints(RouterRequest& r) const;
  void Enqueue(const RouterRequest& r);
  // Nothing that the last try depends on is known to be better now.
  bool TriedInVain(const RouterRequest& r, const Placing& how, absl::Time now) const;
  // Tokens of prompts that the workers compute in a second, together; 0: unknown.
  double PromptRate() const;
  // What workers hold of the request's prompt.
  void LookUp(RouterRequest& r, absl::Time now);
  void NamePrefixes(RouterRequest& r) const;
  static void SetAffinity(RouterRequest& r);
  // CacheHints.junction. The latents and the snapshot that it lies between may be of different workers.
  uint64_t JunctionOf(const RouterRequest& r) const;
  // A worker for a part of the request, and why.
  struct Choice {
    Worker* worker = nullptr;
    RequestShape shape;
    Holding holding;
    CostParts cost;
    int64_t cached_tokens = 0;  // of the shape's, with what is fetched or read
    LinkId fetch_from = 0;      // 0: nothing is
    int64_t fetch_tokens = 0;

    int64_t to_compute() const { return shape.compute_tokens - cached_tokens; }
  };
  // A worker that could send the state it holds of the prompt in question.
  struct FetchFrom {
    const Worker* worker = nullptr;
    int64_t blocks = 0;
    double delay = 0;   // until it looks around, and has read what is only on its disk
    bool cold = false;  // that is so
  };
  // The workers that a part could go to, with their prices. Of the last try; kept for its memory.
  struct Priced {
    std::vector<Worker*> workers;
    std::vector<Candidate> candidates;  // candidates[i] is workers[i]
    RequestShape shape;

    void Start(const RequestShape& of) {
      workers.clear();
      candidates.clear();
      shape = of;
    }
    void Add(Worker* worker, const Holding& holding) {
      workers.push_back(worker);
      candidates.push_back({.load = &worker->load, .holding = holding, .cost = {}, .fetch = {}});
    }
  };
  struct Pair {
    std::optional<Choice> prefill, decode;  // nobody has room who could be it
  };
  Pair ChoosePair(const RouterRequest& r, int64_t position, const MeanRates& rates);
  double LeastAfterPrefill() const;
  // What a decode worker lacks of the state at `position`, which is to be handed over to it.
  Holding Lacking(const Worker& worker, const IndexMatch& match, int64_t position) const;
  // Once the decode worker has granted its landing.
  std::optional<Choice> ChoosePrefillFor(const RouterRequest& r, const Worker& decode);
  std::optional<Choice> ChoosePrefill(const RouterRequest& r, int64_t position,
                                      const MeanRates& rates);
  struct DecodeWay {
    bool handoff = false;           // the state comes from a prefill worker,
    const Choice* after = nullptr;  // from this one; null: nobody knows yet from which
    bool anyone = false;            // else: also who holds nothing of the prompt may compute it
  };
  std::optional<Choice> ChooseDecode(const RouterRequest& r, int64_t position,
                                     const MeanRates& rates, const DecodeWay& way);
  std::optional<Choice> Choose(Priced& priced, const MeanRates& rates);
  Choice ChoiceOf(const Priced& priced, size_t candidate) const;
  // What a worker restores of the first `most` tokens, and what it could read for more.
  Holding Cached(const Worker& worker, const IndexMatch& match, int64_t most) const;
  // Fills fetch_from_.
  void FindFetchSources(const RouterRequest& r);
  void AddFetches(const Worker& worker, const IndexMatch& match, Holding& holding) const;
  // What the worker has to read for this snapshot below its memory. Latents of a snapshot in memory are there
  // too; those beyond count as to be read.
  static int64_t ReadBytes(const Worker& worker, const IndexMatch& match, SnapshotBlocks snapshot);
  // Leading blocks whose latents the worker has in memory, so that nobody need send them. Of one with a
  // store those beyond its snapshots there may be on its disk only, and count as lacking; too careful where
  // it has a bucket and no disk.
  static LatentBlocks WarmLatents(const Worker& worker, const IndexMatch& match);
  // Where the state that the worker was chosen with is to be had; nothing: nowhere any more.
  std::optional<mesh::FetchSource> FetchSourceOf(const RouterRequest& r) const;
  // Of a request, also of one that has ended and awaits word of this fetch. Null: nobody remembers it.
  Decision* DecisionOf(const RouterRequest* r, const RequestId& id,
                       const Decision::OpenFetch& fetch);
  void OnFetchResult(const Worker& from, const mesh::FetchResult& message);
  void CountFetch(const Worker& by, const mesh::FetchResult& message);
  // The worker is told of this source, and is to say what came of it.
  void AwaitFetch(const RouterRequest& r, LinkId by);
  void OnConnection(const Worker& from, const mesh::ConnectionMeasured& message);
  static Receiver ReceiverOf(const Worker& worker) {
    return {worker.load.name, worker.registration.epoch()};
  }
  void LearnBandwidth(LinkId from, const Worker& to, uint64_t bytes, double seconds);
  double MoveSeconds(const Worker& from, const Worker& to, int64_t bytes) const;
  // Notes for DecisionLog: a placement, and how the request ended.
  void Explain(const RouterRequest& r, const std::optional<Choice>& prefill, const Choice& decode);
  void ExplainMatch(const RouterRequest& r, Decision& d) const;
  void Conclude(const RouterRequest& r, const absl::Status& status);
  // What the worker has of the prompt, as it was looked up last.
  static IndexMatch HeldBy(const RouterRequest& r, LinkId link);
  // The prompt's blocks that the worker restores from memory; and how many of the first `most` it holds under
  // their names from then on.
  static std::span<const uint64_t> Restored(const RouterRequest& r, LinkId link);
  static size_t Named(const RouterRequest& r, const Worker& worker, size_t most);
  bool FitsAStep(const Choice& choice) const;
  void Assign(RouterRequest& r, const std::optional<Choice>& prefill, const Choice& decode,
              absl::Time now);
  void AssignPrefill(RouterRequest& r, const Choice& prefill);
  // One end of a hand-over, with its price.
  struct End {
    const Worker& worker;
    const Holding& holding;
    const CostParts& cost;
  };
  static End EndOf(const Choice& c) { return {*c.worker, c.holding, c.cost}; }
  static End EndOf(const Priced& priced, size_t i) {
    return {*priced.workers[i], priced.candidates[i].holding, priced.candidates[i].cost};
  }
  // What a request costs on either way, with what rates do not tell of.
  CostParts HandedOver(const End& prefill, const End& decode) const;
  // What the decode worker lacks is on its way for so long, beyond what passes while the other computes.
  double HandOverSeconds(const End& prefill, const Worker& to, const Holding& holding) const;
  CostParts Alone(CostParts decode) const;
  MeanRates RatesNow() const;
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
  void Finish(RouterRequest& r, mesh::SequenceOutput::End end, absl::Time now);
  void Fail(RouterRequest& r, const absl::Status& status);
  static Room DecodeRoom(const RouterRequest& r);
  static Room PrefillRoom(const RouterRequest& r);
  void ReleaseDecode(RouterRequest& r);
  void ReleasePrefill(RouterRequest& r);
  void Erase(RouterRequest& r);
  // The turn's prompt and what was delivered become its session's content, unless one that began
  // later ended before; the request ends next.
  void KeepSession(RouterRequest& r, bool ended, absl::Time now);
  bool IsRunning(const SessionId& session) const;

  Priced prefills_, decodes_, alone_;  // to hand over to, and to compute alone
  std::vector<FetchFrom> fetch_from_;  // of the last try, the deepest first
  DecisionCandidate scratch_;

  RouterRequest* Find(const RequestId& id) {
    const auto it = requests.find(id);
    return it == requests.end() ? nullptr : &it->second;
  }
  using Results = std::vector<std::pair<std::string, uint64_t>>;
  static void CountReason(const std::string& name, Results& results);
  int64_t BlockTokens() const;
};

}  // namespace deltamesh
