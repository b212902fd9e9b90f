// An engine with a prefix cache and tiers below it, in one thread.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/prefix/prefix_hash.h"
#include "services/worker/state_tier.h"
#include "tests/unit/engine/engine_fixture.h"
#include "tests/unit/engine/every_tail.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh::testing {

inline constexpr int64_t kVocab = 768;

class TieredEngine {
 public:
  TieredEngine(const std::string& family, const std::string& folder,
               std::unique_ptr<ObjectStore> objects, StateTierOptions tier_options = {},
               int64_t cache_bytes = int64_t{64} << 20, int64_t disk_bytes = int64_t{64} << 20,
               int64_t disk_records = kStoreRecordsDefault,
               int64_t bucket_records = kStoreRecordsDefault)
      : family_(family), engine(family, Options()) {
    cache = *PrefixCache::Create({.bytes_max = cache_bytes, .plan = {}}, engine.engine->pools());
    const StateIdentity identity = {.model = "model", .layout = engine.engine->pools().layout};
    std::unique_ptr<DiskStore> disk;
    if (!folder.empty()) {
      DiskStoreOptions options;
      options.folder = folder;
      options.bytes_max = disk_bytes;
      options.records_max = disk_records;
      options.identity = identity;
      auto opened = DiskStore::Open(options, &clock);
      CHECK_OK(opened.status());
      disk = *std::move(opened);
    }
    std::unique_ptr<ObjectStates> states;
    if (objects != nullptr) {
      ObjectStatesOptions options;
      options.bytes_max = int64_t{64} << 20;
      options.identity = identity;
      options.records_max = bucket_records;
      states = std::make_unique<ObjectStates>(options, std::move(objects), &clock);
    }
    tier_options.threads = false;
    tier = std::make_unique<StateTier>(tier_options, cache.get(), std::move(disk),
                                       std::move(states), nullptr);
    Settle();
  }

  static EngineOptions Options() {
    EngineOptions options;
    options.chunk_tokens_max = 100;
    options.step_tokens_max = 150;
    return options;
  }
  static std::vector<PrefixKey> PathOf(const std::vector<TokenId>& tokens) {
    PrefixChain chain("model", "salt");
    chain.Append(tokens);
    return chain.keys();
  }
  static SequenceSpec Watched(std::vector<TokenId> prompt, int64_t max_tokens) {
    SequenceSpec spec = GreedySpec(std::move(prompt), max_tokens);
    spec.sampling.logprobs = kLogprobsMax;
    return spec;
  }

  // Time passes, and all that is due is done.
  void Settle(absl::Duration time = absl::ZeroDuration()) {
    clock.now += time;
    for (int i = 0; i < 6; ++i) {
      tier->Poll(clock.now);
      tier->RunIo();
      clock.now += absl::Milliseconds(1);
    }
    tier->Poll(clock.now);
  }

  // As a worker's core starts a prompt.
  SequenceId Start(const std::vector<TokenId>& prompt, int64_t max_tokens = 6) {
    std::vector<PrefixKey> path = PathOf(prompt);
    path.resize((prompt.size() - 1) / kBlockTokens);
    if (const StateLoadRef load = tier->Load(path, 0, clock.now)) {
      Settle();
      EXPECT_TRUE(tier->Ended(load, clock.now));
    }
    const PrefixMatch match = cache->Find(path);
    SequenceSpec spec = Watched(prompt, max_tokens);
    spec.state = *cache->Restore(path, clock.now);
    restored = spec.state == nullptr ? 0 : spec.state->position();
    std::map<int64_t, SnapshotKind> kinds;
    for (const CutPoint& cut : cache->Plan(path, match, {})) {
      spec.cuts.push_back(cut.blocks * kBlockTokens);
      kinds[cut.blocks] = cut.kind;
    }
    spec.at_cut = [this, path, kinds](const SequenceState& state) {
      cache->Keep(path, state, {.kind = kinds.at(state.position() / kBlockTokens)}, clock.now);
    };
    return engine.Add(std::move(spec));
  }
  Result Run(const std::vector<TokenId>& prompt, int64_t max_tokens = 6) {
    const SequenceId id = Start(prompt, max_tokens);
    engine.RunAll();
    clock.now += absl::Seconds(1);
    return engine.results[id];
  }
  Result Cold(const std::vector<TokenId>& prompt, int64_t max_tokens = 6) const {
    EngineUnderTest t(family_);
    const SequenceId id = t.Add(Watched(prompt, max_tokens));
    t.RunAll();
    return t.results[id];
  }
  // Memory forgets before each prompt, so that its state comes from below.
  void ExpectEveryTailInCompany(const std::vector<TokenId>& head) {
    testing::ExpectEveryTailInCompany(
        family_, engine, head,
        [this](const std::vector<TokenId>& prompt, int64_t max_tokens, int64_t positions) {
          cache->Clear();
          const SequenceId id = Start(prompt, max_tokens);
          EXPECT_EQ(restored, positions) << prompt.size();
          return id;
        });
    EXPECT_EQ(Metric("store_loads_total", "hit"), 64);
    cache->Clear();
    engine.ExpectBaseline();
  }
  SessionStoreDone Done() {
    Settle();
    std::vector<SessionStoreDone> done = tier->TakeDone();
    CHECK(done.size() == 1, "%d answers", done.size());
    return std::move(done.front());
  }
  double Metric(const std::string& name, const std::string& label) const {
    MetricList list;
    tier->AddMetrics(list);
    double sum = 0;
    for (const MetricSample& s : list.Take()) {
      for (const auto& [key, value] : s.labels)
        sum += s.name == name && value == label ? s.value : 0;
    }
    return sum;
  }

 private:
  const std::string family_;

 public:
  SteppedClock clock;
  EngineUnderTest engine;
  std::unique_ptr<PrefixCache> cache;
  std::unique_ptr<StateTier> tier;
  int64_t restored = 0;
};

}  // namespace deltamesh::testing
