#include "services/simulate/cache_run.h"

#include <algorithm>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "services/simulate/free_state_cache.h"

namespace deltamesh {
namespace {

absl::Time At(double second) { return absl::UnixEpoch() + absl::Seconds(second); }

// What is done with a prompt and with an answer that ended, under one kind of cache.
class Cache {
 public:
  virtual ~Cache() = default;
  virtual int64_t Prompt(const Turn& turn, CacheRunResult& result) = 0;  // blocks found
  virtual void Answer(const Turn& turn, double now, CacheRunResult& result) = 0;
};

std::span<const PrefixKey> Blocks(const Turn& turn, int64_t blocks) {
  return std::span(*turn.keys).first(static_cast<size_t>(blocks));
}

class TreeCache final : public Cache {
 public:
  TreeCache(const CachePolicy& policy, const CacheBytes& bytes)
      : cache_(policy, bytes), bytes_(bytes) {}

  int64_t Prompt(const Turn& turn, CacheRunResult& result) override {
    const auto path = Blocks(turn, turn.prompt_blocks());
    const PolicyCache::Found found =
        cache_.Open(path, {.breakpoints = turn.breakpoints}, At(turn.at));
    result.prompts_with_grid += cache_.planner().grid_blocks() > 0;
    for (const CutPoint& cut : found.cuts) {
      Keep(path, {.blocks = cut.blocks, .kind = cut.kind, .session = turn.session}, turn.at,
           result);
    }
    return found.match.snapshot.value();
  }
  void Answer(const Turn& turn, double now, CacheRunResult& result) override {
    if (!cache_.keeps_ends() || turn.answer_blocks() == 0) return;
    Keep(
        Blocks(turn, turn.answer_blocks()),
        {.blocks = turn.answer_blocks(), .kind = SnapshotKind::kAnswerEnd, .session = turn.session},
        now, result);
  }

 private:
  void Keep(std::span<const PrefixKey> path, const SnapshotSpec& spec, double now,
            CacheRunResult& result) {
    cache_.Keep(path, spec, At(now));
    for (const PrefixChange& change : cache_.tree().TakeChanges()) {
      result.snapshots_taken += change.what == PrefixChange::kSnapshotAdded;
    }
    const PrefixTreeStats& stats = cache_.tree().stats();
    result.snapshots_peak = std::max(result.snapshots_peak, stats.snapshots);
    result.snapshot_bytes_peak = result.snapshots_peak * bytes_.snapshot;
    result.bytes_peak = std::max(result.bytes_peak, cache_.tree().bytes());
    result.superseded = static_cast<int64_t>(stats.superseded);
    result.evicted = static_cast<int64_t>(stats.evicted);
  }

  PolicyCache cache_;
  const CacheBytes bytes_;
};

class BoundCache final : public Cache {
 public:
  explicit BoundCache(const CacheBytes& bytes)
      : cache_(bytes.bytes_max, bytes.block), block_(bytes.block) {}

  int64_t Prompt(const Turn& turn, CacheRunResult& result) override {
    const auto path = Blocks(turn, turn.prompt_blocks());
    const int64_t found = cache_.Use(path);
    cache_.Add(path);
    Count(result);
    return found;
  }
  void Answer(const Turn& turn, double, CacheRunResult& result) override {
    cache_.Add(Blocks(turn, turn.answer_blocks()));
    Count(result);
  }

 private:
  void Count(CacheRunResult& result) const {
    result.bytes_peak = std::max(result.bytes_peak, cache_.blocks() * block_);
    result.evicted = cache_.evicted();
  }

  FreeStateCache cache_;
  const int64_t block_;
};

// Later first, so that the earliest is on top; ties in order of arrival.
struct Ending {
  double at;
  int64_t number;
  Turn turn;

  bool operator<(const Ending& other) const {
    return std::pair(other.at, other.number) < std::pair(at, number);
  }
};

}  // namespace

double CacheRunResult::hit_rate() const {
  return prompt_tokens > 0
             ? static_cast<double>(restored_tokens) / static_cast<double>(prompt_tokens)
             : 0;
}

double CacheRunResult::recomputed_per_request() const {
  return requests > 0
             ? static_cast<double>(prompt_tokens - restored_tokens) / static_cast<double>(requests)
             : 0;
}

absl::StatusOr<CacheRunResult> RunCache(Traffic& traffic, const CachePolicy& policy,
                                        const CacheBytes& bytes) {
  std::unique_ptr<Cache> cache;
  if (policy.free_state) {
    cache = std::make_unique<BoundCache>(bytes);
  } else {
    cache = std::make_unique<TreeCache>(policy, bytes);
  }
  CacheRunResult result;
  std::priority_queue<Ending> endings;
  for (;;) {
    const std::optional<double> next = traffic.NextAt();
    if (!endings.empty() && (!next || endings.top().at <= *next)) {
      const Ending ending = endings.top();
      endings.pop();
      cache->Answer(ending.turn, ending.at, result);
      traffic.Finished(ending.turn, ending.at);
      result.last_second = ending.at;
      continue;
    }
    if (!next) break;
    Turn turn = traffic.Next();
    const int64_t found = cache->Prompt(turn, result);
    result.prompt_tokens += turn.prompt_tokens;
    result.restored_tokens += found * kPrefixBlockTokens;
    ++result.requests;
    const double end = turn.at + turn.answer_seconds;
    endings.push({.at = end, .number = result.requests, .turn = std::move(turn)});
  }
  RETURN_IF_ERROR(traffic.status());
  return result;
}

}  // namespace deltamesh
