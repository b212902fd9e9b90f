// How many workers a traffic needs. Averages only: queues are what `deltamesh simulate` is for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/common/quantities.h"
#include "services/plan/sizes.h"

namespace deltamesh {

struct WorkerMachine {
  double memory_bytes = 0;  // of a worker, for weights and sequences
  double link_bytes_per_second = 25e9;
  double link_seconds = 50e-6;  // fixed cost of a hand-off
  // At least so many hold the routed experts; 0: attention workers hold all experts themselves.
  int64_t expert_shards = 0;
  // Of an expert worker. 0: what a worker has that reaches the traffic's rates with all weights in it.
  double expert_flops_per_second = 0;
  double expert_read_bytes_per_second = 0;
};

// CPU of a router, all of it on the one thread that serves clients. What `deltamesh bench-router` measured
// (tools/bench/README.md): a request with one token of answer, what a token of a text prompt adds, and what
// a token of an answer adds where eight answers stream together.
struct RouterCost {
  double request_seconds = 1.4e-3;
  double prompt_token_seconds = 0.2e-6;
  double answer_token_seconds = 30e-6;
  int64_t live_requests = 1024;  // that a router admits at once
};

struct PlannedTraffic {
  double requests_per_second = 0;  // 0: not asked
  int64_t input_tokens = 0;        // mean prompt
  int64_t uncached_tokens = 0;     // of it, computed anew
  int64_t output_tokens = 0;
  double prefill_tokens_per_second = 0;  // of a worker
  double decode_tokens_per_second = 0;   // of a worker, all its sequences together
  double stream_tokens_per_second = 0;   // of one sequence; decides how long it stays
  int64_t step_tokens = 512;             // of prompts in one step of a prefill worker
  double utilisation = 0.7;              // of what a worker could do, so that queues stay short
};

// What each number may be, in units of its flag.
inline constexpr int64_t kPlanTokensMax = 1'000'000'000;
inline constexpr int64_t kPlanShardsMax = 1'000'000;
inline constexpr NumberRange kMemoryRange = {"memory", 0, 1e6, "GB"};
inline constexpr NumberRange kLinkRange = {"link", 1e-3, 1e5, "GB per second"};
inline constexpr NumberRange kRequestsRange = {"requests", 0, 1e9, "requests per second"};
inline constexpr NumberRange kPrefillRange = {"prefill-rate", 1e-3, 1e9, "tokens per second"};
inline constexpr NumberRange kDecodeRange = {"decode-rate", 1e-3, 1e9, "tokens per second"};
inline constexpr NumberRange kStreamRange = {"stream-rate", 1e-3, 1e9, "tokens per second"};
inline constexpr NumberRange kUtilisationRange = {"utilisation", 0.01, 1, "of a worker's rates"};
inline constexpr NumberRange kExpertFlopsRange = {"expert-tflops", 0, 1e6,
                                                  "TFLOP per second; 0 for what the rates say"};
inline constexpr NumberRange kExpertReadRange = {"expert-read", 0, 1e6,
                                                 "GB per second; 0 for what the rates say"};
inline constexpr NumberRange kRouterRequestRange = {"router-request-ms", 0, 1e6,
                                                    "milliseconds of CPU"};
inline constexpr NumberRange kRouterPromptRange = {"router-prompt-us", 0, 1e6,
                                                   "microseconds of CPU"};
inline constexpr NumberRange kRouterAnswerRange = {"router-answer-us", 0, 1e6,
                                                   "microseconds of CPU"};
inline constexpr int64_t kRouterLiveMax = 1'000'000'000;

// Workers of a role that one limit alone asks for, before they are whole.
struct Limit {
  std::string name;
  double workers = 0;
};
struct Needed {
  std::vector<Limit> limits;

  static int64_t Whole(const Limit& limit);  // at least one
  int64_t by(const std::string& name) const;
  const Limit& largest() const;  // which decides; of equal ones the first
  int64_t count() const { return Whole(largest()); }
};

// What routed experts cost and what an expert worker is taken to do.
struct ExpertLoad {
  double flops_per_token = 0;
  double row_bytes_per_token = 0;  // of rows that come back for a token; fewer go out
  double read_bytes_per_second = 0;
  double flops_per_second = 0;  // of a worker, and:
  double reads_per_second = 0;
};

struct Fleet {
  double resident_sequences = 0;
  double router_cpu_per_request = 0;  // seconds
  Needed prefill, decode, router;
  Needed expert;  // no limits: workers hold the experts
  ExpertLoad experts;
};

// Bytes that a worker has left for sequences; negative when its weights do not fit.
double MemoryForSequences(const ModelShape& shape, const WorkerMachine& machine);
// Running sequences of `tokens` tokens that fit beside the weights.
int64_t SessionsPerWorker(const ModelShape& shape, const SequenceSizes& sizes,
                          const WorkerMachine& machine, int64_t tokens);
// A hand-off of a prompt of which the receiver lacks `missing_tokens`.
double HandoffSeconds(const SequenceSizes& sizes, const WorkerMachine& machine,
                      int64_t missing_tokens);

// Numbers outside their ranges.
absl::Status CheckMachine(const WorkerMachine& machine);

// INVALID_ARGUMENT for numbers of all three outside their ranges.
absl::StatusOr<Fleet> PlanFleet(const ModelShape& shape, const SequenceSizes& sizes,
                                const WorkerMachine& machine, const PlannedTraffic& traffic,
                                const RouterCost& router);

}  // namespace deltamesh
