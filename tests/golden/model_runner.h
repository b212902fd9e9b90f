// A model with everything it needs to run in a test: pools, a thread pool, experts in process.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/thread_pool.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/expert/local_experts.h"
#include "runtime/model/model.h"

namespace deltamesh {

using Tokens = std::vector<TokenId>;
using Sizes = std::vector<int64_t>;

// Experts in process that remember whom they were asked for.
class RecordingExperts final : public ExpertBackend {
 public:
  RecordingExperts(const ExpertSet* set, ThreadPool* pool) : local_(set, pool) {}
  absl::StatusOr<uint64_t> Start(const ExpertBatch& batch) override;
  absl::Status Finish(uint64_t ticket) override { return local_.Finish(ticket); }

  bool Visited(int64_t layer, int64_t expert) const { return visited_.contains({layer, expert}); }

 private:
  LocalExperts local_;
  std::set<std::pair<int64_t, int64_t>> visited_;
};

// Failures of loading or of a forward pass stop the test program with their message.
class ModelRunner {
 public:
  ModelRunner(const std::string& folder, int threads, const LoadOptions& options = {});
  // Shares the weights of `other`; the two must not run at the same time.
  ModelRunner(const ModelRunner& other, int threads);

  Model& model() { return *model_; }
  const ModelConfig& config() const { return model_->config(); }
  int64_t vocab() const { return config().vocab; }
  const RecordingExperts& experts() const { return experts_; }

  // An empty sequence with room for `tokens`.
  std::unique_ptr<SequenceState> NewState(int64_t tokens) const;

  void Forward(std::span<SequenceChunk> batch);
  // Feeds tokens in calls of `sizes`; returns the logits of every position, [tokens, vocab].
  std::vector<float> Feed(SequenceState& state, std::span<const TokenId> tokens,
                          const Sizes& sizes);
  std::vector<float> FeedAll(SequenceState& state, std::span<const TokenId> tokens) {
    return Feed(state, tokens, {static_cast<int64_t>(tokens.size())});
  }

 private:
  std::shared_ptr<Model> model_;
  ThreadPool pool_;
  RecordingExperts experts_;
  StatePools pools_;
};

// Call sizes from 1 to `largest` that add up to `tokens`.
Sizes RandomSizes(std::mt19937& random, int64_t tokens, int64_t largest);
Tokens RandomTokens(std::mt19937& random, int64_t count, int64_t vocab);
// "1,2,3", as the oracle's commands take them.
std::string Join(const Tokens& tokens);

// Every float that carries the sequence: all of the slab (open tile included), and the written rows of
// all blocks.
std::vector<float> StateFloats(const SequenceState& state);

inline bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}
double WorstDifference(std::span<const float> a, std::span<const float> b);

// The checkpoints with golden files.
inline const std::vector<std::string>& GoldenNames() {
  static const auto* names = new std::vector<std::string>{"kimi_k3_tiny", "kimi_linear_tiny"};
  return *names;
}
std::string GoldenFolder(const std::string& name);

// The distribution's interpreter, which has numpy; another one on PATH may not.
inline constexpr char kPython[] = "/usr/bin/python3";
// Runs a shell command; returns its output, and its exit status through `status`.
std::string RunCommand(const std::string& command, int* status);

// A folder of its own below the build folder, removed at the end.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& name);
  ~ScratchFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace deltamesh
