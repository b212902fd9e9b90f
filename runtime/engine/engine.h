// The step loop of one worker: plan -> forward -> sample -> outputs. Owns the pools and the sequences.
//
// Driven from outside by one thread: Add, Remove and Step are not thread-safe and never wait for anything
// but the experts of the running step. Time and randomness do not enter: the same calls give the same
// tokens; how they fall into steps depends on whether a slab is free.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/base/ids.h"
#include "runtime/base/thread_pool.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/expert/backend.h"
#include "runtime/model/model.h"
#include "runtime/sampling/sampling_params.h"

namespace deltamesh {

// Every bound has a flag and is printed at start.
struct EngineOptions {
  int64_t slabs = 16;                 // resident sequences; a free one serves a cut within a step
  int64_t latent_blocks = 1024;       // pool of 64-token blocks
  int64_t step_tokens_max = 512;      // token budget of one step
  int64_t chunk_tokens_max = 256;     // most prompt tokens of one sequence in one step
  int64_t running_max = 16;           // sequences in one batch, at most step_tokens_max
  int64_t context_tokens_max = 8192;  // prompt + answer of one sequence
};

// INVALID_ARGUMENT names the bound that cannot hold. Create checks it too; this is for before the weights
// are read.
absl::Status CheckEngineOptions(const EngineOptions& options);

enum class FinishKind : uint8_t { kRunning, kStopToken, kMaxTokens, kContextLimit, kPrefilled };

// A sequence to run. With `stop_at` > 0 it is a prefill: computed up to exactly that position, no token is
// sampled, and the state stays resident until Remove. Otherwise it generates.
struct SequenceSpec {
  RequestId request;            // for logs
  std::vector<TokenId> prompt;  // at least one token
  std::unique_ptr<SequenceState>
      state;  // null: start empty. Else restored at a position < prompt.size()
  SamplingParams sampling;
  int64_t max_tokens = 0;  // generating: at least 1
  std::vector<TokenId> stop_tokens;
  int64_t stop_at = 0;
  // Prefill only: layer `layer` of the model holds its final state at `stop_at` (called during the last
  // chunk, layers ascending). May be null.
  std::function<void(int64_t layer, const SequenceState& state)> layer_final;
  // Where to call `at_cut`: multiples of 64, ascending, above the state's position, at most the
  // prompt's length (`stop_at` when prefilling).
  std::vector<int64_t> cuts;
  // With `cut_answer` also at each multiple of 64 from the end of the prompt on.
  bool cut_answer = false;
  // A state that stands at a cut: the sequence's, or a copy where a step passed one; valid until it returns.
  // Called within Step, must not call the engine. May be null.
  std::function<void(const SequenceState& state)> at_cut;
};

struct TokenOutput {
  TokenId token;
  float logprob = 0;                           // when SamplingParams.logprobs >= 0
  std::vector<std::pair<TokenId, float>> top;  // highest first
};

struct SequenceOutput {
  SequenceId id;
  std::vector<TokenOutput> tokens;
  int64_t first_index = 0;  // index of tokens[0] in the answer
  FinishKind finish = FinishKind::kRunning;
  absl::Status error;  // not OK: the sequence is gone, nothing else is set
};

struct StepReport {
  std::vector<SequenceOutput> outputs;  // only sequences with something to say
  int64_t tokens = 0;                   // computed in this step
  int64_t prompt_tokens = 0;
  int64_t sequences = 0;
};

class Engine {
 public:
  // `model`, `experts` and `pool` must outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(Model* model, ExpertBackend* experts,
                                                        ThreadPool* pool,
                                                        const EngineOptions& options);
  ~Engine();

  // Checks against every bound before anything is taken: INVALID_ARGUMENT (too long, bad token),
  // RESOURCE_EXHAUSTED (no slab, or blocks for the whole sequence are not free: they are reserved here, so
  // an admitted sequence never runs out on its way).
  absl::StatusOr<SequenceId> Add(SequenceSpec spec);
  // Frees everything of a sequence; unknown ids are ignored. A finished generating sequence is removed by
  // the engine itself.
  void Remove(SequenceId id);
  // The state of a resident sequence, null when unknown.
  const SequenceState* state(SequenceId id) const;

  bool HasWork() const;
  // One step. When the experts fail, every sequence of the step ends with that error.
  StepReport Step();

  const StatePools& pools() const;
  const EngineOptions& options() const;
  int64_t running() const;
  int64_t waiting() const;
  int64_t waiting_tokens() const;  // prompt tokens not yet computed

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltamesh
