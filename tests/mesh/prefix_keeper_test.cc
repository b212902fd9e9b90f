// What a worker says of the blocks that its prefix cache would give up.
#include "services/worker/prefix_keeper.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "runtime/cache/sequence_state.h"
#include "services/worker/metric_list.h"

namespace deltamesh {
namespace {

constexpr int64_t kBlocks = 6;

double InMetrics(const PrefixKeeper& keeper) {
  MetricList list;
  keeper.AddMetrics(list);
  for (const MetricSample& sample : list.Take()) {
    if (sample.name == "pool_reclaimable_slots") return sample.value;
  }
  return -1;
}

uint64_t InHeartbeat(PrefixKeeper& keeper) {
  mesh::Heartbeat load;
  keeper.AddReclaimable(&load);
  return load.latent_blocks_free();
}

// A pass over all blocks of a large cache takes long, and metrics are asked for many times a second.
TEST(PrefixKeeper, CountsWhatTheCacheWouldGiveUpNowAndThenForHeartbeatsAndMetrics) {
  const StatePools pools = *StatePools::Create({.kda_layers = 1,
                                                .heads = 1,
                                                .dim = 16,
                                                .conv_taps = 4,
                                                .mla_layers = 1,
                                                .rank = 8,
                                                .rope = 0},
                                               2, 20);
  const std::unique_ptr<PrefixCache> cache =
      *PrefixCache::Create({.bytes_max = int64_t{64} << 20, .plan = {}}, pools);
  PrefixKeeper keeper(cache.get(), nullptr, mesh::ModelIdentity());
  const absl::Time begin = absl::FromUnixSeconds(1000);
  keeper.SetTime(begin);
  EXPECT_EQ(InHeartbeat(keeper), 0u);
  EXPECT_EQ(InMetrics(keeper), 0);

  KeptPrompt prompt;
  const std::vector<TokenId> tokens(static_cast<size_t>(kBlocks * kBlockTokens), TokenId{7});
  keeper.Open(mesh::CacheHints(), tokens, kBlocks * kBlockTokens, &prompt);
  std::unique_ptr<SequenceState> state = *SequenceState::Create(pools);
  std::vector<SlotRef> latents;
  for (int64_t i = 0; i < kBlocks; ++i) latents.push_back(*pools.blocks->Take());
  state->Restore(kBlocks * kBlockTokens, std::move(latents));
  keeper.KeepArrived(prompt, *state, begin);
  state.reset();  // the cache alone holds the blocks now
  ASSERT_EQ(cache->ReclaimableBlocks(), kBlocks);

  keeper.SetTime(begin + absl::Milliseconds(99));
  EXPECT_EQ(InHeartbeat(keeper), 0u);
  EXPECT_EQ(InMetrics(keeper), 0) << "as of the last count";
  keeper.SetTime(begin + absl::Milliseconds(100));
  EXPECT_EQ(InHeartbeat(keeper), static_cast<uint64_t>(kBlocks));
  EXPECT_EQ(InMetrics(keeper), static_cast<double>(kBlocks));
}

}  // namespace
}  // namespace deltamesh
