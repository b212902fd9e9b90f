// The router's decisions: membership, admission, placement, retries, relaying. A state machine:
// messages, transport events and a time go in, actions come out. No threads, no clock, no gRPC, no
// text.
//
// Every accepted request ends exactly once: with ClientFinished, with ClientFailed, or by
// CancelClient or CompleteClient.
//
// One request:
//   Submit -> [waiting] -> StartDecode -> LandingGranted -> StartPrefill -> HandoffResult ->
//   outputs -> end
// With a prompt of at most one block, or without a live prefill worker, handoff_tokens is 0 and the
// decode worker computes the whole prompt.
//
// Attempts (mesh.proto has the rule). Each placement takes kAttemptsPerPlacement numbers from one
// counter of the router; a message that carries another attempt than the current one is stale:
// ignored and counted. An id that is used again therefore hears nothing of its earlier requests.
//  * HandoffResult n with an error: attempt n+1, of the same placement, starts when the decode
//    worker's new LandingGranted arrives; RequestFailed n instead of a grant ends the request.
//  * The prefill worker is lost or gives up: CancelRequest to the decode worker, then StartDecode
//    with the numbers of a new placement (to the same worker or another). A worker needs to know
//    nothing of earlier attempts.
//
// Who waits is placed in the order of fair_queue.h; a request costs what the mesh has to compute for it:
// prompt tokens that no worker holds, and the answer as long as answers were of late.
//
// A worker that refuses for want of room costs nothing but time: the request waits on, until a
// heartbeat shows room or waiting_max is over.
//
// Not thread-safe: one thread owns it. Times never go backwards.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/base/ids.h"
#include "services/common/link.h"
#include "services/router/decision_log.h"
#include "services/router/router_options.h"
#include "services/router/session_types.h"

namespace deltamesh {

struct ClientRequest {
  RequestId request_id;
  std::vector<TokenId> prompt;  // at least one
  mesh::Sampling sampling;      // validated, every field set
  int64_t max_tokens = 0;       // 0: up to the context limit
  std::vector<TokenId> stop_token_ids;
  absl::Time deadline = absl::InfiniteFuture();
  mesh::CacheHints cache;  // passed on to workers
  // Names of the prompt's blocks before its last token (PrefixKey::index), where they are known already;
  // empty: the router names them.
  std::vector<uint64_t> prefix_keys;
  TraceContext trace;   // the client's, if it has one
  SessionId session;    // whose turn this is; empty: nobody's
  bool append = false;  // to that session: refused while another turn of it runs
};

struct TokenUsage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
};

// ---- actions ------------------------------------------------------------------------------------
struct SendToWorker {
  LinkId link = 0;
  mesh::RouterMessage message;
};
struct CloseLink {
  LinkId link = 0;
  absl::Status status;
};
struct ClientTokens {
  RequestId request_id;
  mesh::SequenceOutput output;  // first_index is exactly the count delivered before
  int64_t cached_tokens = 0;    // of the prompt, as far as known
  bool overtaken = false;       // as of these tokens: see ClientFinished
};
struct ClientFinished {
  RequestId request_id;
  mesh::SequenceOutput::End end = mesh::SequenceOutput::RUNNING;
  TokenUsage usage;
  bool overtaken = false;  // a turn of its session that began later ended before: that one counts
};
struct ClientFailed {
  RequestId request_id;
  absl::Status status;
};
using RouterAction = std::variant<SendToWorker, CloseLink, ClientTokens, ClientFinished,
                                  ClientFailed, SessionAnswered>;

// What happened since the start; only grows.
struct RouterCounters {
  uint64_t submitted = 0, rejected = 0, finished = 0, failed = 0, cancelled = 0;
  uint64_t registered = 0, registrations_refused = 0, leases_expired = 0;
  uint64_t prefill_lost = 0, decode_lost = 0, expert_lost = 0;
  uint64_t handoffs_ok = 0, handoffs_refused = 0, prefill_retries = 0, placement_refusals = 0;
  uint64_t handoff_bytes = 0;
  double handoff_seconds = 0;
  uint64_t stale_messages = 0;  // of an ended request, an old attempt or a replaced link
  uint64_t malformed_messages = 0;
  uint64_t cached_tokens = 0;   // prompt tokens of finished requests that workers restored
  uint64_t placed_prefill = 0;  // placements with a prefill worker
  uint64_t placed_append = 0;   // by a decode worker alone, which held a part of the prompt
  uint64_t placed_fetch = 0;    // by a decode worker alone, which fetches a part of the prompt
  uint64_t placed_alone = 0;    // by a decode worker alone, from the beginning
  double waited_seconds = 0;    // of placed requests, until they had their place
  uint64_t prefix_lookups = 0;  // of a prompt in the index
  uint64_t prefix_resyncs = 0;  // workers that had to tell their prefixes anew
  std::vector<std::pair<std::string, uint64_t>>
      handoff_results,  // by reason name; a small known set
      fetch_results;
  uint64_t fetched_tokens = 0, fetched_bytes = 0;
  SessionCounters sessions;
};

// One that ended, for whoever counts how long they take.
struct FetchSeen {
  std::string reason;  // "OK", a refusal's name, or "OTHER"
  double seconds = 0;  // from asking to the last byte or the refusal
  uint64_t bytes = 0;  // of its payload; 0 when it was refused
};
inline constexpr size_t kFetchesSeenMax = 4096;  // kept until they are taken; later ones are not

struct RouterGauges {
  int64_t waiting = 0, live = 0;
  int64_t prefill_workers = 0, decode_workers = 0, expert_workers = 0;
  int64_t prefix_blocks = 0;   // in the index, counted once for each 64 workers
  int64_t prefix_objects = 0;  // states in object stores, counted likewise
  int64_t prefix_bytes = 0;    // of the index
  int64_t links_measured = 0;  // pairs of workers whose bandwidth is known
  int64_t waiting_tokens = 0;  // what waiting requests cost
  int64_t waiting_tenants = 0;
  double drain_seconds = 0;    // until all of them have a place, as estimated; 0: not known
  int64_t prefix_unknown = 0;  // workers whose prefixes are not all told yet
  int64_t sessions = 0, session_bytes = 0, session_calls = 0;
  int64_t sessions_unsettled = 0;  // stores may have older records of them
  uint64_t sessions_evicted = 0;
  int64_t stores = 0,
          stores_away = 0;  // workers with a store that are connected, and that may come back
};

class RouterCore {
 public:
  explicit RouterCore(RouterOptions options);
  ~RouterCore();
  RouterCore(const RouterCore&) = delete;
  RouterCore& operator=(const RouterCore&) = delete;

  // ALREADY_EXISTS (live id), INVALID_ARGUMENT (empty or too long prompt), RESOURCE_EXHAUSTED (a
  // bound; the status says when to come again, see retry_hint.h), UNAVAILABLE (no decode worker, or
  // an expert shard is missing). An error leaves nothing behind and causes no action.
  absl::Status Submit(ClientRequest request, absl::Time now);
  // The client left. False when the request is not live. No client action follows.
  bool CancelClient(const RequestId& id, absl::Time now);
  // The client has all it wants (a stop string matched in the answer's first `taken` tokens): as
  // CancelClient, but the request counts as finished.
  bool CompleteClient(const RequestId& id, int64_t taken, absl::Time now);
  // Of a request that runs: as in ClientFinished.
  bool IsOvertaken(const RequestId& id) const;
  // The same for a turn that ended with the very tokens in which the stop string matched: its session keeps
  // no more than `tokens`, prompt and answer, unless a later turn has left its own there meanwhile.
  void TrimSession(const SessionId& session, const RequestId& turn, int64_t tokens, absl::Time now);

  // Sessions (session_calls.h). The one SessionAnswered of a call may come at once; a cancelled call is
  // answered too.
  void CallSession(SessionCall call, absl::Time now);
  void CancelSessionCall(const RequestId& id, absl::Time now);

  void OnLinkOpened(LinkId link, absl::Time now);
  void OnWorkerMessage(LinkId link, const mesh::WorkerMessage& message, absl::Time now);
  // Also after a CloseLink of ours; unknown links are ignored.
  void OnLinkClosed(LinkId link, const absl::Status& status, absl::Time now);

  // Enforces leases and deadlines. Call at least every 100 ms.
  void Tick(absl::Time now);

  // In order; the caller carries them out in this order.
  std::vector<RouterAction> TakeActions();
  // Fetches that ended since the last call.
  std::vector<FetchSeen> TakeFetches();

  // OK when a new request could be placed: a decode worker, and every shard of the expert table.
  absl::Status Ready() const;
  const RouterOptions& options() const;
  // The identity in force; nothing until configured or learned.
  std::optional<mesh::ModelIdentity> identity() const;
  // Most prompt + answer tokens any live decode worker can hold, also one that drains; 0 without one.
  int64_t context_tokens() const;
  // When a client that is refused for want of room should come again.
  absl::Duration RetryAfter() const;
  // Why the last requests went where they went.
  const DecisionLog& decisions() const;
  // One that Submit refused, or that was refused before.
  void NoteRefusal(const RefusedRequest& refusal, absl::Time now);
  // Hears of each request when it has ended or was refused, with all that is known of it: the place of an
  // exporter of spans. Called by whoever calls the core; must not block.
  using Concluded = std::function<void(const Decision&)>;
  void OnConcluded(Concluded concluded);
  const RouterCounters& counters() const;
  RouterGauges gauges() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The line in the log about who never came into the queue.
void LogRefused(const RefusedRequest& refusal);

}  // namespace deltamesh
