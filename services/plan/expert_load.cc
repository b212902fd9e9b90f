#include "services/plan/expert_load.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr double kRowValueBytes = 4;  // rows cross as floats

// Experts that a token chooses in all layers.
double ChosenPerToken(const ModelShape& shape) {
  return static_cast<double>(shape.moe_layers * shape.top_k);
}

double ParametersOfExpert(const ModelShape& shape) {
  return static_cast<double>(shape.expert_parameters) /
         static_cast<double>(shape.moe_layers * shape.experts);
}

// Steps of a decode worker with `sequences` of them, which may be less than one.
double StepsPerSecond(double sequences, const PlannedTraffic& t) {
  return t.stream_tokens_per_second * std::min(1.0, sequences);
}

double FlopsOfWorker(const ModelShape& shape, const WorkerMachine& machine,
                     const PlannedTraffic& t) {
  if (machine.expert_flops_per_second > 0) return machine.expert_flops_per_second;
  const double dense = 2 * static_cast<double>(shape.dense_parameters - shape.head_parameters);
  return t.prefill_tokens_per_second * (dense + ExpertFlopsPerToken(shape));
}

double ReadsOfWorker(const ModelShape& shape, const WorkerMachine& machine,
                     const PlannedTraffic& t) {
  if (machine.expert_read_bytes_per_second > 0) return machine.expert_read_bytes_per_second;
  const double together = t.decode_tokens_per_second / t.stream_tokens_per_second;
  const auto dense = static_cast<double>(shape.dense_bytes);
  return StepsPerSecond(together, t) * (dense + ExpertBytesOfStep(shape, together));
}

}  // namespace

double ExpertFlopsPerToken(const ModelShape& shape) {
  return shape.experts > 0 ? 2 * ChosenPerToken(shape) * ParametersOfExpert(shape) : 0;
}

double ExpertRowBytesPerToken(const ModelShape& shape) {
  return ChosenPerToken(shape) * static_cast<double>(shape.expert_width) * kRowValueBytes;
}

double ExpertBytesOfStep(const ModelShape& shape, double tokens) {
  if (shape.experts == 0) return 0;
  const double missed = 1 - static_cast<double>(shape.top_k) / static_cast<double>(shape.experts);
  return static_cast<double>(shape.expert_bytes) * (1 - std::pow(missed, std::max(tokens, 1.0)));
}

absl::Status PlanExperts(const ModelShape& shape, const WorkerMachine& machine,
                         const PlannedTraffic& t, Fleet* fleet) {
  if (shape.experts == 0 || shape.moe_layers == 0) {
    return InvalidArgument("expert-shards: %d, and the model has no routed experts; use 0",
                           machine.expert_shards);
  }
  // A shard holds whole ids: an expert id in every layer.
  const double id_bytes =
      static_cast<double>(shape.expert_bytes) / static_cast<double>(shape.experts);
  const double ids = std::floor(machine.memory_bytes / id_bytes);
  if (ids < 1) {
    return ResourceExhausted(
        "memory: %.0f bytes do not hold one expert of every layer, %.0f bytes; give a worker more "
        "memory",
        machine.memory_bytes, id_bytes);
  }
  const double rate = t.requests_per_second, busy = t.utilisation;
  const double prompt = rate * static_cast<double>(t.uncached_tokens);
  const double tokens = prompt + rate * static_cast<double>(t.output_tokens);
  const auto decoders = static_cast<double>(fleet->decode.count());
  const double sequences = fleet->resident_sequences / decoders;
  const auto chunk = static_cast<double>(std::min(t.step_tokens, t.uncached_tokens));

  ExpertLoad& e = fleet->experts;
  e.flops_per_token = ExpertFlopsPerToken(shape);
  e.row_bytes_per_token = ExpertRowBytesPerToken(shape);
  e.read_bytes_per_second =
      prompt / chunk * ExpertBytesOfStep(shape, chunk) +
      decoders * StepsPerSecond(sequences, t) * ExpertBytesOfStep(shape, sequences);
  e.flops_per_second = FlopsOfWorker(shape, machine, t);
  e.reads_per_second = ReadsOfWorker(shape, machine, t);
  const double link = machine.link_bytes_per_second;
  fleet->expert.limits = {{"memory", static_cast<double>(shape.experts) / ids},
                          {"compute", tokens * e.flops_per_token / (e.flops_per_second * busy)},
                          {"reading", e.read_bytes_per_second / (e.reads_per_second * busy)},
                          {"link", tokens * e.row_bytes_per_token / (link * busy)},
                          {"asked", static_cast<double>(machine.expert_shards)}};
  return absl::OkStatus();
}

}  // namespace deltamesh
