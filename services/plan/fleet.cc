#include "services/plan/fleet.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/status.h"
#include "services/plan/expert_load.h"

namespace deltamesh {
namespace {

constexpr double kWorkersMax = 1e9;  // of a role; beyond it the question was a slip

absl::Status CheckCount(const char* role, const Needed& needed) {
  const Limit& most = needed.largest();
  if (most.workers <= kWorkersMax) return absl::OkStatus();
  return InvalidArgument(
      "requests: would take %g %s workers by %s, more than %s; ask for fewer requests, shorter "
      "ones, "
      "or faster workers",
      most.workers, role, most.name, ReadableNumber(kWorkersMax));
}

absl::Status CheckTraffic(const PlannedTraffic& t, const RouterCost& r) {
  RETURN_IF_ERROR(CheckNumber(kRequestsRange, t.requests_per_second));
  RETURN_IF_ERROR(CheckWhole("input-tokens", t.input_tokens, 1, kPlanTokensMax, "tokens"));
  RETURN_IF_ERROR(CheckWhole("output-tokens", t.output_tokens, 1, kPlanTokensMax, "tokens"));
  RETURN_IF_ERROR(CheckWhole("uncached-tokens", t.uncached_tokens, 1, t.input_tokens, "tokens"));
  RETURN_IF_ERROR(CheckWhole("step-tokens", t.step_tokens, 1, kPlanTokensMax, "tokens"));
  for (const auto& [range, rate] : {std::pair(kPrefillRange, t.prefill_tokens_per_second),
                                    std::pair(kDecodeRange, t.decode_tokens_per_second),
                                    std::pair(kStreamRange, t.stream_tokens_per_second)}) {
    if (rate == 0) {
      return InvalidArgument("%s: is missing; `deltamesh bench` measures it", range.name);
    }
    RETURN_IF_ERROR(CheckNumber(range, rate));
  }
  RETURN_IF_ERROR(CheckNumber(kUtilisationRange, t.utilisation));
  RETURN_IF_ERROR(CheckNumber(kRouterRequestRange, r.request_seconds * 1e3));
  RETURN_IF_ERROR(CheckNumber(kRouterPromptRange, r.prompt_token_seconds * 1e6));
  RETURN_IF_ERROR(CheckNumber(kRouterAnswerRange, r.answer_token_seconds * 1e6));
  return CheckWhole("router-live-requests", r.live_requests, 1, kRouterLiveMax, "requests");
}

Needed Routers(const PlannedTraffic& t, const RouterCost& cost, double in_mesh, double cpu) {
  Needed needed;
  needed.limits = {{"compute", t.requests_per_second * cpu / t.utilisation},
                   {"requests", in_mesh / static_cast<double>(cost.live_requests)}};
  return needed;
}

}  // namespace

int64_t Needed::Whole(const Limit& limit) {
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(limit.workers - 1e-9)));
}

int64_t Needed::by(const std::string& name) const {
  for (const Limit& limit : limits) {
    if (limit.name == name) return Whole(limit);
  }
  return 0;
}

const Limit& Needed::largest() const {
  CHECK(!limits.empty());
  return *std::max_element(limits.begin(), limits.end(),
                           [](const Limit& a, const Limit& b) { return a.workers < b.workers; });
}

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

absl::Status CheckMachine(const WorkerMachine& m) {
  RETURN_IF_ERROR(CheckNumber(kMemoryRange, m.memory_bytes / 1e9));
  RETURN_IF_ERROR(CheckNumber(kLinkRange, m.link_bytes_per_second / 1e9));
  RETURN_IF_ERROR(CheckNumber(kExpertFlopsRange, m.expert_flops_per_second / 1e12));
  RETURN_IF_ERROR(CheckNumber(kExpertReadRange, m.expert_read_bytes_per_second / 1e9));
  return CheckWhole("expert-shards", m.expert_shards, 0, kPlanShardsMax, "shards");
}

absl::StatusOr<Fleet> PlanFleet(const ModelShape& shape, const SequenceSizes& sizes,
                                const WorkerMachine& machine, const PlannedTraffic& t,
                                const RouterCost& router) {
  RETURN_IF_ERROR(CheckMachine(machine));
  RETURN_IF_ERROR(CheckTraffic(t, router));
  if (machine.memory_bytes == 0) {
    return InvalidArgument(
        "memory: is missing; give one machine's bytes, which workers for a traffic depend on");
  }
  const int64_t longest = t.input_tokens + t.output_tokens;
  const auto sessions = static_cast<double>(SessionsPerWorker(shape, sizes, machine, longest));
  if (sessions == 0) {
    return ResourceExhausted(
        "memory: %.0f bytes less the weights hold no sequence of %d tokens; give a worker more "
        "memory or put experts on shards",
        machine.memory_bytes, longest);
  }
  const double rate = t.requests_per_second, busy = t.utilisation;
  const double computed = rate * static_cast<double>(t.uncached_tokens);
  const double generated = rate * static_cast<double>(t.output_tokens);
  Fleet fleet;
  // Little's law: those in the house are the arrivals times the stay.
  fleet.resident_sequences = generated / t.stream_tokens_per_second;
  const double waiting = computed / t.prefill_tokens_per_second;  // prompts in work, the same way
  // A hand-off passes one link of either role; rows of experts come back over it, and fewer
  // go out.
  const double moved = rate * (sizes.snapshot() + sizes.latents(t.uncached_tokens));
  const double rows = machine.expert_shards > 0 ? ExpertRowBytesPerToken(shape) : 0;
  const double link = machine.link_bytes_per_second * busy;
  fleet.prefill.limits = {{"compute", computed / (t.prefill_tokens_per_second * busy)},
                          {"memory", waiting / sessions},
                          {"link", (moved + computed * rows) / link}};
  fleet.decode.limits = {{"compute", generated / (t.decode_tokens_per_second * busy)},
                         {"memory", fleet.resident_sequences / sessions},
                         {"link", (moved + generated * rows) / link}};
  fleet.router_cpu_per_request = router.request_seconds +
                                 router.prompt_token_seconds * static_cast<double>(t.input_tokens) +
                                 router.answer_token_seconds * static_cast<double>(t.output_tokens);
  fleet.router =
      Routers(t, router, fleet.resident_sequences + waiting, fleet.router_cpu_per_request);
  RETURN_IF_ERROR(CheckCount("prefill", fleet.prefill));
  RETURN_IF_ERROR(CheckCount("decode", fleet.decode));
  RETURN_IF_ERROR(CheckCount("router", fleet.router));
  if (machine.expert_shards > 0) {
    RETURN_IF_ERROR(PlanExperts(shape, machine, t, &fleet));
    RETURN_IF_ERROR(CheckCount("expert", fleet.expert));
  }
  return fleet;
}

}  // namespace deltamesh
