// One engine in this process, fed with given ids, for the rows of a benchmark.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/base/ids.h"
#include "runtime/base/thread_pool.h"
#include "runtime/expert/local_experts.h"
#include "runtime/model/model.h"

namespace deltamesh {

class BenchEngine {
 public:
  // `model` must outlive it.
  BenchEngine(Model* model, int threads, int64_t chunk_tokens)
      : model_(model),
        chunk_tokens_(chunk_tokens),
        pool_(threads),
        experts_(&model->experts(), &pool_) {}

  // Empty sequences with room for `tokens` each; the first is fed BenchTokens of `first`.
  absl::Status Restart(int64_t sequences, int64_t tokens, uint64_t first = 0);
  // The next `tokens` of every sequence, in chunks; logits of the last position only.
  absl::Status Feed(int64_t tokens);
  // One more token of every sequence: BenchToken's, or the likeliest after the last logits.
  absl::Status Step() { return Step(false); }
  absl::Status StepGreedy() { return Step(true); }

  // Keeps the only sequence, whose position is a multiple of kBlockTokens, ...
  void Keep();
  // ... and continues from it with room for `tokens` more.
  absl::Status Return(int64_t tokens);

  const Model& model() const { return *model_; }

 private:
  absl::Status Step(bool greedy);
  TokenId Token(size_t sequence, int64_t position) const;
  TokenId Likeliest(size_t sequence) const;

  Model* const model_;
  const int64_t chunk_tokens_;
  ThreadPool pool_;
  LocalExperts experts_;
  uint64_t first_ = 0;
  StatePools pools_;
  std::vector<std::unique_ptr<SequenceState>> states_;
  std::vector<float> logits_;
  std::vector<float> kept_slab_;
  std::vector<SlotRef> kept_blocks_;
  int64_t kept_position_ = 0;
};

}  // namespace deltamesh
