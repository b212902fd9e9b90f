// How many workers a traffic needs. Averages only: queues are what `deltamesh simulate` is for.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "services/plan/sizes.h"

namespace deltamesh {

struct WorkerMachine {
  double memory_bytes = 0;  // of a worker, for weights and sequences
  double link_bytes_per_second = 25e9;
  double link_seconds = 50e-6;  // fixed cost of a hand-off
  int64_t expert_shards = 0;    // 0: attention workers hold all experts themselves
};

struct Traffic {
  double requests_per_second = 0;  // 0: not asked
  int64_t input_tokens = 0;        // mean prompt
  int64_t uncached_tokens = 0;     // of it, computed anew
  int64_t output_tokens = 0;
  double prefill_tokens_per_second = 0;  // of a worker
  double decode_tokens_per_second = 0;   // of a worker, all its sequences together
  double stream_tokens_per_second = 0;   // of one sequence; decides how long it stays
  double utilisation = 0.7;              // of what a worker could do, so that queues stay short
};

// How many of a kind each limit alone asks for; the largest decides.
struct Needed {
  int64_t by_compute = 0, by_memory = 0, by_link = 0;
  int64_t count() const;
};
struct Fleet {
  double resident_sequences = 0;
  Needed prefill, decode;
  int64_t expert_shards = 0;
};

// Bytes that a worker has left for sequences; negative when its weights do not fit.
double MemoryForSequences(const ModelShape& shape, const WorkerMachine& machine);
// Running sequences of `tokens` tokens that fit beside the weights.
int64_t SessionsPerWorker(const ModelShape& shape, const SequenceSizes& sizes,
                          const WorkerMachine& machine, int64_t tokens);
// A hand-off of a prompt of which the receiver lacks `missing_tokens`.
double HandoffSeconds(const SequenceSizes& sizes, const WorkerMachine& machine,
                      int64_t missing_tokens);

absl::StatusOr<Fleet> PlanFleet(const ModelShape& shape, const SequenceSizes& sizes,
                                const WorkerMachine& machine, const Traffic& traffic);

}  // namespace deltamesh
