// What Forward promises beside the numbers: errors of experts pass through, misuse stops the process.
#include <gtest/gtest.h>

#include "runtime/base/status.h"
#include "tests/golden/model_runner.h"

namespace deltamesh {
namespace {

// Fails in the `fail_at`-th Start (even) or Finish (odd) call.
class FailingExperts final : public ExpertBackend {
 public:
  FailingExperts(const ExpertSet* set, ThreadPool* pool, int fail_at)
      : local_(set, pool), left_(fail_at) {}
  absl::StatusOr<uint64_t> Start(const ExpertBatch& batch) override {
    if (left_-- == 0) return Unavailable("expert shard b: gone; retry elsewhere");
    return local_.Start(batch);
  }
  absl::Status Finish(uint64_t ticket) override {
    if (left_-- == 0) return DeadlineExceeded("expert shard b: silent; retry elsewhere");
    return local_.Finish(ticket);
  }

 private:
  LocalExperts local_;
  int left_;
};

class ForwardContract : public testing::TestWithParam<std::string> {
 protected:
  ForwardContract() : runner_(GoldenFolder(GetParam()), 2) {}
  ModelRunner runner_;
};

TEST_P(ForwardContract, ExpertErrorsPassThroughAndTheModelGoesOn) {
  std::mt19937 random(1);
  const Tokens tokens = RandomTokens(random, 20, runner_.vocab());
  const std::vector<float> truth = runner_.FeedAll(*runner_.NewState(20), tokens);
  ThreadPool pool(2);
  for (int fail_at = 0; fail_at < 4; ++fail_at) {
    FailingExperts experts(&runner_.model().experts(), &pool, fail_at);
    const auto state = runner_.NewState(20);
    SequenceChunk chunk;
    chunk.state = state.get();
    chunk.tokens = tokens;
    const absl::Status status = runner_.model().Forward({&chunk, 1}, experts, pool);
    EXPECT_EQ(status.code(), fail_at % 2 == 0 ? absl::StatusCode::kUnavailable
                                              : absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(state->position(), 0);
    EXPECT_TRUE(SameBits(runner_.FeedAll(*runner_.NewState(20), tokens), truth));
  }
}

TEST_P(ForwardContract, MisuseStopsTheProcess) {
  const auto state = runner_.NewState(64);
  const Tokens tokens = {1, 2, 3};
  const auto chunk = [&](std::span<const TokenId> t) {
    SequenceChunk c;
    c.state = state.get();
    c.tokens = t;
    return c;
  };
  std::vector<SequenceChunk> twice = {chunk(tokens), chunk(tokens)};
  EXPECT_DEATH(runner_.Forward(twice), "twice");
  std::vector<SequenceChunk> empty = {chunk({})};
  EXPECT_DEATH(runner_.Forward(empty), "without tokens");
  const Tokens unknown = {static_cast<TokenId>(runner_.vocab())};
  std::vector<SequenceChunk> bad_token = {chunk(unknown)};
  EXPECT_DEATH(runner_.Forward(bad_token), "token 768 of 768");
  const Tokens many(65, 1);
  std::vector<SequenceChunk> unreserved = {chunk(many)};
  EXPECT_DEATH(runner_.Forward(unreserved), "blocks reserved");
  std::vector<SequenceChunk> greedy = {chunk(tokens)};
  greedy[0].logits = 4;
  EXPECT_DEATH(runner_.Forward(greedy), "4 logits of 3 tokens");
  EXPECT_DEATH(runner_.Forward({}), "0 tokens");
}

TEST(ForwardContractLoading, ExpertsAloneCannotRunTheModel) {
  LoadOptions options;
  options.only_experts = true;
  const auto model = Model::Load(GoldenFolder("kimi_k3_tiny"), options);
  ASSERT_TRUE(model.ok()) << model.status();
  ThreadPool pool(1);
  LocalExperts experts(&(*model)->experts(), &pool);
  std::vector<SequenceChunk> batch(1);
  EXPECT_DEATH((void)(*model)->Forward(batch, experts, pool), "only experts were loaded");
}

INSTANTIATE_TEST_SUITE_P(All, ForwardContract, testing::ValuesIn(GoldenNames()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace deltamesh
