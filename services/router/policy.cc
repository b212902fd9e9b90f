#include "services/router/policy.h"

#include <tuple>

namespace deltamesh {
namespace {

bool HasRoom(const WorkerLoad& worker, const RequestShape& request) {
  return !worker.draining && worker.slabs_free >= 1 && worker.blocks_free >= request.blocks &&
         worker.context_tokens >= request.context_tokens;
}

// Prompts are computed faster than answers; the mixed rate stands in until a worker has measured it.
double PromptRate(const WorkerLoad& worker) {
  return worker.prompt_tokens_per_second > 0 ? worker.prompt_tokens_per_second
                                             : worker.tokens_per_second;
}

// The mean of the known rates, so that a worker that has not measured itself yet is neither shunned
// nor flooded; 1 when nobody has.
double FallbackRate(std::span<const WorkerLoad> workers) {
  double sum = 0;
  int64_t known = 0;
  for (const WorkerLoad& w : workers) {
    if (PromptRate(w) > 0) {
      sum += PromptRate(w);
      ++known;
    }
  }
  return known > 0 ? sum / static_cast<double>(known) : 1.0;
}

}  // namespace

double EstimateCost(const WorkerLoad& worker, const RequestShape& request, const Holding& holding,
                    double fallback_rate) {
  const double tokens = static_cast<double>(worker.waiting_tokens + worker.resident +
                                            request.compute_tokens - holding.cached_tokens);
  const double rate = PromptRate(worker);
  return tokens / (rate > 0 ? rate : fallback_rate) + holding.transfer_seconds;
}

std::optional<WorkerChoice> ChooseWorker(std::span<const WorkerLoad> workers,
                                         const RequestShape& request,
                                         std::span<const Holding> holdings) {
  const double fallback = FallbackRate(workers);
  std::optional<WorkerChoice> best;
  std::tuple<double, int64_t, int64_t, uint64_t> best_key;
  for (size_t i = 0; i < workers.size(); ++i) {
    const WorkerLoad& w = workers[i];
    if (!HasRoom(w, request)) continue;
    const std::tuple<double, int64_t, int64_t, uint64_t> key = {
        EstimateCost(w, request, holdings.empty() ? Holding{} : holdings[i], fallback),
        -w.slabs_free, -w.blocks_free, PlacementHash(request.request_id, w.name)};
    if (!best || key < best_key) {
      best = {.index = i, .seconds = std::get<0>(key)};
      best_key = key;
    }
  }
  return best;
}

uint64_t PlacementHash(std::string_view request_id, std::string_view worker) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto mix = [&hash](std::string_view bytes) {
    for (const char c : bytes) {
      hash ^= static_cast<unsigned char>(c);
      hash *= 0x100000001b3u;
    }
  };
  mix(request_id);
  mix(std::string_view("\0", 1));
  mix(worker);
  return hash;
}

}  // namespace deltamesh
