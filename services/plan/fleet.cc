#include "services/plan/fleet.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int64_t kTokensMax = 100'000'000'000;  // so that sums of their bytes stay below 2^63

int64_t WorkersFor(double work, double per_worker) {
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(work / per_worker - 1e-9)));
}

absl::Status Check(const Traffic& t) {
  if (t.input_tokens < 1 || t.output_tokens < 1 || t.input_tokens > kTokensMax ||
      t.output_tokens > kTokensMax) {
    return InvalidArgument("input-tokens %d and output-tokens %d: use 1 to %d for both",
                           t.input_tokens, t.output_tokens, kTokensMax);
  }
  if (t.uncached_tokens < 1 || t.uncached_tokens > t.input_tokens) {
    return InvalidArgument("uncached-tokens: %d; use 1 to input-tokens, %d", t.uncached_tokens,
                           t.input_tokens);
  }
  if (!(t.prefill_tokens_per_second > 0) || !(t.decode_tokens_per_second > 0) ||
      !(t.stream_tokens_per_second > 0)) {
    return InvalidArgument(
        "prefill-rate %g, decode-rate %g, stream-rate %g: each must be positive; `deltamesh bench` "
        "measures them",
        t.prefill_tokens_per_second, t.decode_tokens_per_second, t.stream_tokens_per_second);
  }
  if (!(t.utilisation > 0 && t.utilisation <= 1)) {
    return InvalidArgument("utilisation: %g; use a share above 0, at most 1", t.utilisation);
  }
  return absl::OkStatus();
}

}  // namespace

int64_t Needed::count() const { return std::max({by_compute, by_memory, by_link}); }

double MemoryForSequences(const ModelShape& shape, const WorkerMachine& machine) {
  const int64_t elsewhere = machine.expert_shards > 0 ? shape.expert_bytes : 0;
  return machine.memory_bytes - static_cast<double>(shape.total_weight_bytes() - elsewhere);
}

int64_t SessionsPerWorker(const ModelShape& shape, const SequenceSizes& sizes,
                          const WorkerMachine& machine, int64_t tokens) {
  const double each = sizes.running() + sizes.latents(tokens);
  const double room = MemoryForSequences(shape, machine);
  return each > 0 && room > 0 ? static_cast<int64_t>(room / each) : 0;
}

double HandoffSeconds(const SequenceSizes& sizes, const WorkerMachine& machine,
                      int64_t missing_tokens) {
  const double bytes = sizes.snapshot() + sizes.latents(missing_tokens);
  return machine.link_seconds + bytes / machine.link_bytes_per_second;
}

absl::StatusOr<Fleet> PlanFleet(const ModelShape& shape, const SequenceSizes& sizes,
                                const WorkerMachine& machine, const Traffic& t) {
  RETURN_IF_ERROR(Check(t));
  const int64_t longest = t.input_tokens + t.output_tokens;
  const int64_t sessions = SessionsPerWorker(shape, sizes, machine, longest);
  if (sessions == 0) {
    return ResourceExhausted(
        "memory: %.0f bytes less the weights hold no sequence of %d tokens; give a worker more "
        "memory or put experts on shards",
        machine.memory_bytes, longest);
  }
  const double rate = t.requests_per_second, busy = t.utilisation;
  Fleet fleet;
  // Little's law: those in the house are the arrivals times the stay.
  fleet.resident_sequences =
      rate * static_cast<double>(t.output_tokens) / t.stream_tokens_per_second;
  const double moved = rate * (sizes.snapshot() + sizes.latents(t.uncached_tokens));
  const int64_t links = WorkersFor(moved, machine.link_bytes_per_second * busy);
  const double computed = rate * static_cast<double>(t.uncached_tokens);
  const double waiting = computed / t.prefill_tokens_per_second;  // prompts in work, as above
  fleet.prefill = {.by_compute = WorkersFor(computed, t.prefill_tokens_per_second * busy),
                   .by_memory = WorkersFor(waiting, static_cast<double>(sessions)),
                   .by_link = links};
  fleet.decode = {.by_compute = WorkersFor(rate * static_cast<double>(t.output_tokens),
                                           t.decode_tokens_per_second * busy),
                  .by_memory = WorkersFor(fleet.resident_sequences, static_cast<double>(sessions)),
                  .by_link = links};
  if (machine.expert_shards > 0) {
    fleet.expert_shards = std::max(
        machine.expert_shards,
        WorkersFor(static_cast<double>(shape.expert_bytes), std::max(machine.memory_bytes, 1.0)));
  }
  return fleet;
}

}  // namespace deltamesh
