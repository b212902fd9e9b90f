// A tiny checkpoint, an engine over it, and runs to the end.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/engine/engine.h"
#include "runtime/expert/local_experts.h"

namespace deltamesh::testing {

inline std::string GoldenFolder(const std::string& family) {
  return std::string(DELTAMESH_SOURCE_DIR) + "/tests/data/golden/" + family;
}

// Loaded once per family and process: loading checks and packs everything.
inline Model& GoldenModel(const std::string& family) {
  static auto& models = *new std::map<std::string, std::unique_ptr<Model>>();
  std::unique_ptr<Model>& model = models[family];
  if (model == nullptr) {
    auto loaded = Model::Load(GoldenFolder(family), {});
    CHECK(loaded.ok(), "%s", loaded.status().ToString());
    model = *std::move(loaded);
  }
  return *model;
}

inline nlohmann::json GoldenJson(const std::string& family) {
  std::ifstream in(GoldenFolder(family) + "/golden.json");
  return nlohmann::json::parse(in);
}

// Passes work on to in-process experts until it is told to fail.
class FlakyExperts final : public ExpertBackend {
 public:
  FlakyExperts(const ExpertSet* set, ThreadPool* pool) : local_(set, pool) {}
  // Counts down with each Start and each Finish; the one that reaches 0 fails.
  int fail_after = -1;

  absl::StatusOr<uint64_t> Start(const ExpertBatch& batch) override {
    if (fail_after > 0 && --fail_after == 0) return Unavailable("shard lost at start");
    return local_.Start(batch);
  }
  absl::Status Finish(uint64_t ticket) override {
    const absl::Status status = local_.Finish(ticket);
    if (fail_after > 0 && --fail_after == 0) return Unavailable("shard lost at finish");
    return status;
  }

 private:
  LocalExperts local_;
};

// What a sequence said until its end.
struct Result {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  std::vector<std::pair<TokenId, float>> top;
  FinishKind finish = FinishKind::kRunning;
  absl::Status error;

  friend bool operator==(const Result&, const Result&) = default;
};

class EngineUnderTest {
 public:
  explicit EngineUnderTest(const std::string& family, const EngineOptions& options = {},
                           int threads = 1)
      : model(GoldenModel(family)), pool(threads), experts(&model.experts(), &pool) {
    auto made = Engine::Create(&model, &experts, &pool, options);
    CHECK(made.ok(), "%s", made.status().ToString());
    engine = *std::move(made);
  }

  SequenceId Add(SequenceSpec spec) {
    auto id = engine->Add(std::move(spec));
    CHECK(id.ok(), "%s", id.status().ToString());
    results[*id];
    return *id;
  }

  // One step; the bounds hold and outputs arrive in order.
  StepReport Step() {
    StepReport report = engine->Step();
    EXPECT_LE(report.tokens, engine->options().step_tokens_max);
    EXPECT_LE(report.sequences, engine->options().running_max);
    for (const SequenceOutput& o : report.outputs) {
      Result& r = results[o.id];
      EXPECT_EQ(r.finish, FinishKind::kRunning);
      if (!o.error.ok()) {
        r.error = o.error;
        EXPECT_TRUE(o.tokens.empty());
        continue;
      }
      EXPECT_EQ(o.first_index, static_cast<int64_t>(r.tokens.size()));
      r.finish = o.finish;
      for (const TokenOutput& t : o.tokens) {
        r.tokens.push_back(t.token);
        r.logprobs.push_back(t.logprob);
        r.top.insert(r.top.end(), t.top.begin(), t.top.end());
      }
    }
    return report;
  }

  void RunAll() {
    for (int i = 0; engine->HasWork(); ++i) {
      ASSERT_LT(i, 100000);
      ASSERT_GT(Step().tokens, 0);
    }
  }

  void ExpectBaseline() {
    EXPECT_EQ(engine->pools().slabs->free_slots(), engine->pools().slabs->slots());
    EXPECT_EQ(engine->pools().blocks->free_slots(), engine->pools().blocks->slots());
    EXPECT_FALSE(engine->HasWork());
    EXPECT_EQ(engine->waiting_tokens(), 0);
  }

  Model& model;
  ThreadPool pool;
  FlakyExperts experts;
  std::unique_ptr<Engine> engine;
  std::map<SequenceId, Result> results;
};

inline std::vector<TokenId> RandomPrompt(uint64_t seed, int64_t tokens, int64_t vocab) {
  SeededEntropy entropy(seed);
  std::vector<TokenId> prompt(static_cast<size_t>(tokens));
  for (TokenId& t : prompt) t = static_cast<TokenId>(entropy.Next() % static_cast<uint64_t>(vocab));
  return prompt;
}

inline SequenceSpec GreedySpec(std::vector<TokenId> prompt, int64_t max_tokens) {
  SequenceSpec spec;
  spec.prompt = std::move(prompt);
  spec.sampling.temperature = 0;
  spec.max_tokens = max_tokens;
  return spec;
}

}  // namespace deltamesh::testing
