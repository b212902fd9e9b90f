// Where a request goes: pure functions of what is known about the workers. No state, no clock.
//
// The estimate is the work in front of the request, in seconds where the worker's rate is known:
// tokens that must be computed before it, plus one per resident sequence (each takes a share of
// every step), plus its own. Ties go to the worker with more room, then to a stable hash of
// (affinity, worker), so that several routers and several runs agree and what belongs together stays so.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deltamesh {

// What the router believes about one worker right now: its last heartbeat, corrected by what was
// given to it or came back since.
struct WorkerLoad {
  std::string name;
  bool draining = false;
  int64_t slabs_free = 0;
  int64_t blocks_free = 0;
  int64_t context_tokens = 0;           // most tokens of one sequence
  int64_t resident = 0;                 // sequences there
  int64_t waiting_tokens = 0;           // prompt tokens there not yet computed
  double tokens_per_second = 0;         // 0: unknown
  double prompt_tokens_per_second = 0;  // of steps that mostly compute prompts; 0: unknown
  double store_bytes_per_second = 0;    // of reading states from its disk; 0: unknown
  double object_bytes_per_second = 0;   // and from its object store; 0: unknown
};

struct RequestShape {
  std::string_view affinity;   // of what belongs together: the same worker wins their ties
  int64_t compute_tokens = 0;  // the worker would compute these
  int64_t blocks = 0;          // latent blocks it would hold
  int64_t context_tokens = 0;  // positions it may reach
  // All answers that stream there wait for what it computes.
  bool beside_answers = false;
  double answer_seconds = 0;       // that an answer takes, mostly; 0: unknown
  double first_token_seconds = 0;  // and its first token, mostly; 0: unknown
};

// A state that another worker holds of the prompt's beginning and that could be brought before the rest is
// computed.
struct FetchOffer {
  size_t source = 0;   // the caller's
  int64_t tokens = 0;  // of compute_tokens, that need not be computed then
  int64_t bytes = 0;   // of it that the worker lacks
  double seconds = 0;  // until it is there
  bool cold = false;   // its holder reads it from disk first, which `seconds` has
};
inline constexpr size_t kFetchOffersMax = 4;

// A state below a worker's memory.
struct ColdState {
  int64_t tokens = 0;  // of compute_tokens, that it saves once it is read; 0: there is none
  int64_t bytes = 0;   // of it that the worker's memory lacks
};
enum class ReadFrom : uint8_t { kNothing, kDisk, kObjects };

// What the request finds at one worker.
struct Holding {
  int64_t cached_tokens = 0;    // of compute_tokens, in its memory and restored instead
  double transfer_seconds = 0;  // until what the worker lacks is there
  int64_t transfer_bytes = 0;   // which is this much
  int64_t hideable_bytes = 0;   // of these, that may pass while their sender computes
  // What it could read first, and computes when that is quicker (services/common/store_read.h).
  ColdState disk, objects;
  std::array<FetchOffer, kFetchOffersMax> fetches = {};
  size_t fetch_count = 0;
  bool must_fetch = false;    // it is a choice with one of them only
  int64_t shared_blocks = 0;  // of those it would hold, held for others' requests already
};

// What a request costs, by what it is spent on: seconds where a rate was measured. Until anybody has measured
// one, all but `move` are tokens, which tell who has less to do and not how long it takes.
struct CostParts {
  double queue = 0;      // work in front of the request
  double move = 0;       // until what the worker lacks is there; always seconds
  double compute = 0;    // what is left to compute
  double stall = 0;      // what others' answers wait meanwhile, as it counts
  bool measured = true;  // of a decision's candidates all are, or none is

  // Seconds, or tokens: never a sum of both.
  double total() const { return queue + compute + stall + (measured ? move : 0); }
};

// How much a second counts that the answers at `worker` wait for a request: for each of them as the share of
// an answer that it is, taken of a first token. Both are the usual ones, since a second is the same share of
// an answer whichever request causes it; until a first token's is known it is this request's, `own_seconds`.
// At most 1, so that its own first token comes later by no more than what each of them is spared.
double StallWeight(const WorkerLoad& worker, const RequestShape& request, double own_seconds);

// A worker to choose from, and what Price finds out about it.
struct Candidate {
  const WorkerLoad* load = nullptr;
  Holding holding;
  bool room = false;
  CostParts cost;
  // Of holding.fetches: what is brought first; nothing: what is there is enough.
  std::optional<size_t> fetch;
  ReadFrom read_from = ReadFrom::kNothing;
  double read_seconds = 0;  // of cost.move, until that is read

  const FetchOffer* offer() const { return fetch ? &holding.fetches[*fetch] : nullptr; }
  // Null: it reads none.
  const ColdState* read() const {
    return read_from == ReadFrom::kNothing ? nullptr
           : read_from == ReadFrom::kDisk  ? &holding.disk
                                           : &holding.objects;
  }
  // Of compute_tokens, that are not computed.
  int64_t cached_tokens() const {
    return fetch ? offer()->tokens : read() ? read()->tokens : holding.cached_tokens;
  }
};
// Means over the workers that know theirs, for those that have not measured themselves yet, which are then
// neither shunned nor flooded; 0: nobody knows.
struct MeanRates {
  double prompts = 0;  // tokens a second of prompts
  double any = 0;      // the same, of mixed steps where nobody has measured prompts
};
// What a worker would read before it computes the rest: as StateTier::Load chooses.
struct ReadChoice {
  ReadFrom from = ReadFrom::kNothing;
  double seconds = 0;
};
ReadChoice ReadOf(const WorkerLoad& worker, const Holding& holding);
// Fetches, or reads what the worker has below its memory, where that takes less than computing what it saves.
void Price(std::span<Candidate> candidates, const RequestShape& request, const MeanRates& rates);
// The cheapest few, those with room first; of equals those that Cheapest would take of equal room.
std::vector<size_t> CheapestFew(std::span<const Candidate> candidates, const RequestShape& request,
                                size_t most);
// The cheapest priced one that has room; nothing when none has.
std::optional<size_t> Cheapest(std::span<const Candidate> candidates, const RequestShape& request);

// Stable over processes, compilers and years (FNV-1a over both names with a zero byte between).
uint64_t PlacementHash(std::string_view affinity, std::string_view worker);

}  // namespace deltamesh
