#include "services/router/policy.h"

#include <tuple>

namespace deltamesh {
namespace {

bool HasRoom(const WorkerLoad& worker, const RequestShape& request) {
  return !worker.draining && worker.slabs_free >= 1 && worker.blocks_free >= request.blocks &&
         worker.context_tokens >= request.context_tokens;
}

// The mean of the known rates, so that a worker that has not measured itself yet is neither shunned
// nor flooded; 1 when nobody has.
double FallbackRate(std::span<const WorkerLoad> workers) {
  double sum = 0;
  int64_t known = 0;
  for (const WorkerLoad& w : workers) {
    if (w.tokens_per_second > 0) {
      sum += w.tokens_per_second;
      ++known;
    }
  }
  return known > 0 ? sum / static_cast<double>(known) : 1.0;
}

}  // namespace

double EstimateCost(const WorkerLoad& worker, const RequestShape& request, double fallback_rate) {
  const double tokens =
      static_cast<double>(worker.waiting_tokens + worker.resident + request.compute_tokens);
  return tokens / (worker.tokens_per_second > 0 ? worker.tokens_per_second : fallback_rate);
}

std::optional<size_t> ChooseWorker(std::span<const WorkerLoad> workers,
                                   const RequestShape& request) {
  const double fallback = FallbackRate(workers);
  std::optional<size_t> best;
  std::tuple<double, int64_t, int64_t, uint64_t> best_key;
  for (size_t i = 0; i < workers.size(); ++i) {
    const WorkerLoad& w = workers[i];
    if (!HasRoom(w, request)) continue;
    const std::tuple<double, int64_t, int64_t, uint64_t> key = {
        EstimateCost(w, request, fallback), -w.slabs_free, -w.blocks_free,
        PlacementHash(request.request_id, w.name)};
    if (!best || key < best_key) {
      best = i;
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
