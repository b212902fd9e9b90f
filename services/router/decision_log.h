// Why requests went where they went, and what became of them: the last ones, for whoever asks later.
//
// A ring of fixed size whose slots are filled anew: nobody asking costs a few assignments for each request
// and, once every slot was used, no memory.
//
// What was refused before it came into the queue has a smaller ring of its own: who is refused again
// and again does not push out what was served.
//
// Not thread-safe: part of the router's core.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "runtime/base/ids.h"
#include "services/common/link.h"
#include "services/common/trace_context.h"
#include "services/router/policy.h"

namespace deltamesh {

// One way a request could have gone.
struct DecisionCandidate {
  std::string prefill;  // empty: the decode worker computes the prompt
  std::string decode;
  int64_t cached_tokens = 0;   // of the prompt, restored where it is computed
  int64_t compute_tokens = 0;  // of the prompt, by both
  int64_t move_bytes = 0;      // from the prefill to the decode worker
  std::string fetch_from;      // who sends a part of what is cached first; empty: nobody
  int64_t fetch_tokens = 0;
  int64_t fetch_bytes = 0;
  double fetch_seconds = 0;  // of cost.move
  bool fetch_cold = false;   // it is read from a disk there first
  // What who computes the prompt reads first, for what is cached.
  ReadFrom read_from = ReadFrom::kNothing;
  int64_t read_bytes = 0;
  double read_seconds = 0;  // of cost.move
  CostParts cost;
  bool room = true;  // else it was no choice
};

enum class DecisionReason {
  kNone,        // it waits still
  kCheapest,    // of several
  kOnly,        // no other has room
  kRefused,     // ended before it was placed
  kTurnedAway,  // never came into the queue
};
const char* DecisionReasonName(DecisionReason reason);
// "disk", "object store"; empty for nothing.
const char* ReadFromName(ReadFrom from);

struct Decision {
  static constexpr size_t kCandidatesMax = 16;
  static constexpr size_t kMessageBytesMax = 256;

  std::string request_id;
  TraceContext trace;  // its client's, if there is one
  absl::Time submitted;
  uint64_t order = 0;  // of all decisions
  int64_t prompt_tokens = 0;
  int64_t cost_tokens = 0;      // in the queue
  bool named = false;           // its prefixes were looked up
  int64_t latent_tokens = 0;    // longest match of latents at any worker
  int64_t snapshot_tokens = 0;  // deepest snapshot within a worker's own latents
  bool snapshot_cold = false;   // it lies on a disk, and in nobody's memory
  std::string latents_at, snapshot_at;
  int64_t warm_tokens = 0;    // deepest snapshot in a worker's memory
  int64_t object_tokens = 0;  // deepest state that a worker knows of in its object store
  // Of the last placement.
  int64_t placements = 0;
  double waited_seconds = 0;
  DecisionReason reason = DecisionReason::kNone;
  bool measured = false;  // candidates' costs are seconds; else nobody had measured a rate: tokens
  std::array<DecisionCandidate, kCandidatesMax>
      candidates;  // cheapest first; the chosen one is among them
  size_t candidate_count = 0;
  int64_t candidates_left_out = 0;
  size_t chosen = 0;
  // What happened.
  int64_t handoffs_refused = 0;
  int64_t handoff_bytes = 0;
  double handoff_seconds = 0;
  std::string fetched_from;  // empty: nobody was asked, or no word has come (fetches_open)
  int64_t fetched_tokens = 0, fetched_bytes = 0;
  double fetch_seconds = 0;
  std::string fetch_refusal;  // of the last one; empty: it was not refused
  // Of these fetches no word has come, even when the request has ended: it may still come, or never.
  struct OpenFetch {
    LinkId by = 0;
    uint32_t attempt = 0;

    friend bool operator==(const OpenFetch&, const OpenFetch&) = default;
  };
  std::vector<OpenFetch> fetches_open;
  int64_t restored_tokens = 0;
  int64_t completion_tokens = 0;
  double ttft_seconds = -1;  // below 0: no token yet
  double seconds = -1;       // below 0: it runs
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string message;  // of a failure

  void Add(const DecisionCandidate& candidate);  // keeps the cheapest
};

// A request that was refused before it came into the queue, and why.
struct RefusedRequest {
  RequestId request_id;
  TraceContext trace;
  int64_t prompt_tokens = 0;  // 0: perhaps not known
  absl::Status status;
};

class DecisionLog {
 public:
  static constexpr int64_t kRefusalsShare = 4;  // of so many slots one more for refusals
  // A request's place: valid until the ring has come round.
  using Ticket = uint64_t;

  explicit DecisionLog(int64_t decisions)
      : decided_(static_cast<size_t>(decisions)),
        refused_(static_cast<size_t>((decisions + kRefusalsShare - 1) / kRefusalsShare)) {}

  // A slot as new, but for the memory of its strings. 0 is no ticket.
  Ticket Begin(std::string_view request_id, absl::Time now);
  // Null once the slot was given to another.
  Decision* At(Ticket ticket);
  // Of a request that has ended and still waits for word of this fetch; null: none does. Looks at all.
  Decision* Awaiting(std::string_view request_id, const Decision::OpenFetch& fetch);
  const Decision& Refuse(const RefusedRequest& refusal, absl::Time now);

  // By a request's whole id, or by the client's name of it, or by its trace: the newest first.
  std::vector<const Decision*> Find(std::string_view request_id, size_t most) const;
  std::vector<const Decision*> FindTrace(std::string_view trace_id, size_t most) const;
  std::vector<const Decision*> Last(size_t most) const;

 private:
  struct Ring {
    explicit Ring(size_t size) : slots(size) {}
    Decision& Next();
    // The newest is 0 back; null where there is none.
    const Decision* Back(uint64_t back) const;

    std::vector<Decision> slots;
    uint64_t begun = 0;
  };
  template <typename Wanted>
  std::vector<const Decision*> Select(size_t most, Wanted wanted) const;

  Ring decided_, refused_;
};

}  // namespace deltamesh
