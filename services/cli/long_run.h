// One model and one sequence behind very long contexts, for benchmarks: prompts with the time of each layer,
// and contexts that are filled instead of computed.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/base/ids.h"
#include "runtime/base/thread_pool.h"
#include "runtime/expert/local_experts.h"
#include "runtime/model/model.h"

namespace deltamesh {

// As the flags of all tools.
struct LongRunOptions {
  int threads = 2;
  std::string weights = "stored", activations = "float";
  std::string packed_dir = "auto";
};

// Seconds of some prompt tokens.
struct PromptTime {
  double total = 0;
  // From the end of one layer's token mixer to the end of the next one's, summed by that one's kind: a mixer
  // with one feed-forward part.
  double kda = 0, mla = 0;
};

class LongRun {
 public:
  // `tokens` is the longest context that will be used.
  static absl::StatusOr<std::unique_ptr<LongRun>> Create(const std::string& model,
                                                         const LongRunOptions& options,
                                                         int64_t tokens);

  // An empty sequence.
  absl::Status Restart();
  // The next `tokens` of the prompt in calls of at most `chunk`.
  absl::StatusOr<PromptTime> Feed(int64_t tokens, int64_t chunk);

  // Fills the blocks of `tokens` positions and the slab with numbers of the size that layers write. A step
  // reads the same bytes and computes the same operations as behind a prompt that was computed.
  absl::Status Fill(int64_t tokens);
  // Puts the sequence back (or ahead within what was fed or filled) to `position`, a multiple of 64.
  absl::Status Return(int64_t position);
  // Seconds of one decode step with logits.
  absl::StatusOr<double> Step();

  const Model& model() const { return *model_; }
  // What a sequence holds at `position`: blocks and slab.
  int64_t CacheBytes(int64_t position) const;
  int64_t PoolBytes() const;  // at most

 private:
  LongRun(std::unique_ptr<Model> model, int threads);
  TokenId Token(int64_t position) const;

  const std::unique_ptr<Model> model_;
  ThreadPool pool_;
  LocalExperts experts_;
  StatePools pools_;
  std::unique_ptr<SequenceState> state_;
  std::vector<SlotRef> blocks_;  // all of the pool
  std::vector<float> logits_;
};

// "131072", "128k" or "1M" (powers of two).
absl::StatusOr<int64_t> ParseTokenCount(const std::string& text);
std::string TokenCountText(int64_t tokens);  // the shortest of these

}  // namespace deltamesh
