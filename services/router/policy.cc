#include "services/router/policy.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>
#include <utility>

#include "services/common/store_read.h"

namespace deltamesh {
namespace {

bool HasRoom(const WorkerLoad& worker, const RequestShape& request, int64_t shared_blocks) {
  return !worker.draining && worker.slabs_free >= 1 &&
         worker.blocks_free >= request.blocks - shared_blocks &&
         worker.context_tokens >= request.context_tokens;
}

// What is not computed, and the seconds until it is there.
struct Start {
  int64_t cached_tokens = 0;
  double seconds = 0;
};

// While no rate is known a token costs one, and what takes seconds is not held against it.
CostParts TokensAt(const WorkerLoad& worker, const RequestShape& request, const Start& start) {
  CostParts parts = {.queue = static_cast<double>(worker.waiting_tokens + worker.resident),
                     .move = start.seconds,
                     .compute = static_cast<double>(request.compute_tokens - start.cached_tokens),
                     .measured = false};
  if (request.beside_answers && worker.resident > 0) parts.stall = parts.compute;
  return parts;
}

// `rate`: 0 where nobody has measured one.
CostParts PartsAt(const WorkerLoad& worker, const RequestShape& request, const Start& start,
                  double rate) {
  if (rate <= 0) return TokensAt(worker, request, start);
  CostParts parts = {
      .queue = static_cast<double>(worker.waiting_tokens + worker.resident) / rate,
      .move = start.seconds,
      .compute = static_cast<double>(request.compute_tokens - start.cached_tokens) / rate};
  if (request.beside_answers) {
    parts.stall = parts.compute * StallWeight(worker, request, parts.total());
  }
  return parts;
}

// The cheapest of computing what the worker lacks and of bringing a part of it first.
void ChooseStart(Candidate& c, const RequestShape& request, double rate) {
  const double before = c.holding.transfer_seconds;
  c.fetch.reset();
  const ReadChoice read = ReadOf(*c.load, c.holding);
  c.read_from = read.from;
  c.read_seconds = read.seconds;
  c.cost = PartsAt(*c.load, request, {c.cached_tokens(), before + c.read_seconds}, rate);
  for (size_t i = 0; i < c.holding.fetch_count; ++i) {
    const FetchOffer& offer = c.holding.fetches[i];
    const CostParts cost = PartsAt(*c.load, request, {offer.tokens, before + offer.seconds}, rate);
    const bool first = c.holding.must_fetch && !c.fetch;
    if (!first && cost.total() >= c.cost.total()) continue;
    c.cost = cost;
    c.fetch = i;
    c.read_from = ReadFrom::kNothing;
    c.read_seconds = 0;
  }
}

}  // namespace

double StallWeight(const WorkerLoad& worker, const RequestShape& request, double own_seconds) {
  if (worker.resident == 0) return 0;
  if (request.answer_seconds <= 0) return 1;
  const double first = request.first_token_seconds > 0 ? request.first_token_seconds : own_seconds;
  return std::min(1.0, static_cast<double>(worker.resident) * first / request.answer_seconds);
}

ReadChoice ReadOf(const WorkerLoad& worker, const Holding& holding) {
  struct Tier {
    ReadFrom from;
    const ColdState* state;
    double rate;
  };
  std::array<Tier, 2> tiers = {
      {{ReadFrom::kDisk, &holding.disk, worker.store_bytes_per_second},
       {ReadFrom::kObjects, &holding.objects, worker.object_bytes_per_second}}};
  if (holding.objects.tokens > holding.disk.tokens) std::swap(tiers[0], tiers[1]);
  for (const Tier& tier : tiers) {
    const int64_t saved = tier.state->tokens - holding.cached_tokens;
    if (saved <= 0) break;
    const StoreRead read = {.bytes = tier.state->bytes};
    if (!ReadsFromStore(read, saved, tier.rate, worker.prompt_tokens_per_second)) continue;
    return {tier.from, StoreReadSeconds(read, tier.rate)};
  }
  return {};
}

void Price(std::span<Candidate> candidates, const RequestShape& request, const MeanRates& rates) {
  for (Candidate& c : candidates) {
    double rate = c.load->prompt_tokens_per_second;
    if (rate <= 0) rate = rates.prompts;
    if (rate <= 0) rate = c.load->tokens_per_second;
    c.room = HasRoom(*c.load, request, c.holding.shared_blocks);
    ChooseStart(c, request, rate > 0 ? rate : rates.any);
  }
}

std::vector<size_t> CheapestFew(std::span<const Candidate> candidates, const RequestShape& request,
                                size_t most) {
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const size_t few = std::min(order.size(), most);
  const auto before = [&](size_t a, size_t b) {
    const Candidate &x = candidates[a], &y = candidates[b];
    if (x.room != y.room) return x.room;
    if (x.cost.total() != y.cost.total()) return x.cost.total() < y.cost.total();
    return std::pair(PlacementHash(request.affinity, x.load->name), a) <
           std::pair(PlacementHash(request.affinity, y.load->name), b);
  };
  std::partial_sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(few), order.end(),
                    before);
  order.resize(few);
  return order;
}

std::optional<size_t> Cheapest(std::span<const Candidate> candidates, const RequestShape& request) {
  std::optional<size_t> best;
  using Key = std::tuple<double, double, int64_t, int64_t, uint64_t>;
  Key best_key;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    if (!c.room) continue;
    const Key key = {c.cost.total(), c.cost.measured ? 0 : c.cost.move, -c.load->slabs_free,
                     -c.load->blocks_free, PlacementHash(request.affinity, c.load->name)};
    if (!best || key < best_key) {
      best = i;
      best_key = key;
    }
  }
  return best;
}

uint64_t PlacementHash(std::string_view affinity, std::string_view worker) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto mix = [&hash](std::string_view bytes) {
    for (const char c : bytes) {
      hash ^= static_cast<unsigned char>(c);
      hash *= 0x100000001b3u;
    }
  };
  mix(affinity);
  mix(std::string_view("\0", 1));
  mix(worker);
  return hash;
}

}  // namespace deltamesh
