#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/unit/engine/engine_fixture.h"

namespace deltamesh {
namespace {

using testing::EngineUnderTest;
using testing::GoldenJson;
using testing::GreedySpec;
using ::testing::HasSubstr;
using testing::RandomPrompt;
using testing::Result;

class EngineTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int64_t kVocab = 768;
};

INSTANTIATE_TEST_SUITE_P(Families, EngineTest,
                         ::testing::Values("kimi_k3_tiny", "kimi_linear_tiny"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(EngineTest, GreedyContinuationsOfTheOracle) {
  EngineUnderTest t(GetParam());
  std::map<SequenceId, std::vector<TokenId>> want;
  const nlohmann::json golden = GoldenJson(GetParam());
  for (const auto& g : golden["greedy"]) {
    const auto tokens = g["tokens"].get<std::vector<TokenId>>();
    const auto id = t.Add(GreedySpec(g["prompt"], static_cast<int64_t>(tokens.size())));
    want[id] = tokens;
  }
  ASSERT_GE(want.size(), 3u);
  t.RunAll();
  for (const auto& [id, tokens] : want) {
    EXPECT_EQ(t.results[id].tokens, tokens);
    EXPECT_EQ(t.results[id].finish, FinishKind::kMaxTokens);
  }
  t.ExpectBaseline();
}

// Sequences of many kinds: short and long prompts, greedy and drawn, with penalties and log-probabilities.
std::vector<SequenceSpec> MixedSpecs(int64_t vocab) {
  std::vector<SequenceSpec> specs;
  for (const int64_t tokens : {1, 17, 64, 65, 130, 3}) {
    SequenceSpec s = GreedySpec(RandomPrompt(static_cast<uint64_t>(tokens), tokens, vocab), 12);
    if (tokens % 2 == 1) {
      s.sampling.temperature = 1.2f;
      s.sampling.seed = static_cast<uint64_t>(tokens);
      s.sampling.top_p = 0.95f;
      s.sampling.repetition_penalty = 1.1f;
      s.sampling.frequency_penalty = 0.3f;
    }
    s.sampling.logprobs = 2;
    specs.push_back(std::move(s));
  }
  return specs;
}

SequenceSpec Copy(const SequenceSpec& s) {
  SequenceSpec copy;
  copy.prompt = s.prompt;
  copy.sampling = s.sampling;
  copy.max_tokens = s.max_tokens;
  copy.stop_tokens = s.stop_tokens;
  return copy;
}

TEST_P(EngineTest, OutputsDoNotDependOnCompanyBudgetsOrThreads) {
  const std::vector<SequenceSpec> specs = MixedSpecs(kVocab);
  std::vector<Result> alone;
  for (const SequenceSpec& s : specs) {
    EngineUnderTest t(GetParam());
    const SequenceId id = t.Add(Copy(s));
    t.RunAll();
    alone.push_back(t.results[id]);
    ASSERT_EQ(alone.back().tokens.size(), 12u);
    ASSERT_EQ(alone.back().top.size(), 24u);
    t.ExpectBaseline();
  }
  const std::vector<std::pair<EngineOptions, int>> settings = {
      {{}, 2},
      {{.step_tokens_max = 1, .chunk_tokens_max = 1, .running_max = 1}, 1},
      {{.step_tokens_max = 5, .chunk_tokens_max = 3, .running_max = 4}, 2},
      {{.step_tokens_max = 70, .chunk_tokens_max = 64, .running_max = 3}, 1},
  };
  for (const auto& [options, threads] : settings) {
    EngineUnderTest t(GetParam(), options, threads);
    std::vector<SequenceId> ids;
    // The last ones arrive while the first ones run.
    for (size_t i = 0; i < specs.size(); ++i) {
      ids.push_back(t.Add(Copy(specs[i])));
      if (i >= 3) t.Step();
    }
    t.RunAll();
    for (size_t i = 0; i < specs.size(); ++i) {
      EXPECT_EQ(t.results[ids[i]], alone[i])
          << "sequence " << i << ", budget " << options.step_tokens_max;
    }
    t.ExpectBaseline();
  }
}

// A fresh state in `to` with the contents of `from`, which is at a block boundary: what a hand-off does.
std::unique_ptr<SequenceState> Move(const SequenceState& from, const StatePools& to) {
  auto state = *SequenceState::Create(to);
  const StateLayout& l = to.layout;
  for (int64_t i = 0; i < l.kda_layers; ++i) {
    std::memcpy(state->slab_layer(i).s, from.slab_layer(i).s,
                static_cast<size_t>(l.s_floats()) * 4);
    std::memcpy(state->slab_layer(i).conv, from.slab_layer(i).conv,
                static_cast<size_t>(l.conv_floats()) * 4);
  }
  std::vector<SlotRef> blocks;
  for (int64_t b = 0; b * kBlockTokens < from.position(); ++b) {
    blocks.push_back(*to.blocks->Take());
    std::memcpy(blocks.back().data(), from.blocks()[static_cast<size_t>(b)].data(),
                static_cast<size_t>(l.block_floats()) * 4);
  }
  state->Restore(from.position(), std::move(blocks));
  return state;
}

TEST_P(EngineTest, PrefillHereAndDecodeThereEqualsOneEngine) {
  const auto prompt = RandomPrompt(5, 150, kVocab);
  EngineUnderTest whole(GetParam());
  const SequenceId reference = whole.Add(GreedySpec(prompt, 10));
  whole.RunAll();

  EngineUnderTest prefill(GetParam(), {.chunk_tokens_max = 48});
  SequenceSpec spec;
  spec.prompt = prompt;
  spec.stop_at = 128;
  std::vector<int64_t> layers;
  std::map<int64_t, std::vector<float>> seen;  // S of each KDA layer when it was called final
  const ModelConfig& config = prefill.model.config();
  spec.layer_final = [&](int64_t layer, const SequenceState& state) {
    layers.push_back(layer);
    const LayerKind& kind = config.layers[static_cast<size_t>(layer)];
    if (kind.mixer != MixerKind::kKda) return;
    const float* s = state.slab_layer(kind.mixer_index).s;
    seen[kind.mixer_index].assign(s, s + state.layout().s_floats());
  };
  const SequenceId source = prefill.Add(std::move(spec));
  prefill.RunAll();
  EXPECT_EQ(prefill.results[source].finish, FinishKind::kPrefilled);
  EXPECT_TRUE(prefill.results[source].tokens.empty());
  ASSERT_EQ(static_cast<int64_t>(layers.size()), config.layer_count());
  for (int64_t i = 0; i < config.layer_count(); ++i) EXPECT_EQ(layers[static_cast<size_t>(i)], i);
  const SequenceState* state = prefill.engine->state(source);
  ASSERT_NE(state, nullptr);
  EXPECT_EQ(state->position(), 128);
  for (const auto& [kda, s] : seen) {
    EXPECT_EQ(std::memcmp(s.data(), state->slab_layer(kda).s, s.size() * 4), 0)
        << "KDA layer " << kda;
  }

  EngineUnderTest decode(GetParam());
  SequenceSpec rest = GreedySpec(prompt, 10);
  rest.state = Move(*state, decode.engine->pools());
  const SequenceId id = decode.Add(std::move(rest));
  EXPECT_EQ(decode.engine->waiting_tokens(), 150 - 128);
  decode.RunAll();
  EXPECT_EQ(decode.results[id], whole.results[reference]);
  decode.ExpectBaseline();
  prefill.engine->Remove(source);
  prefill.ExpectBaseline();
}

TEST_P(EngineTest, FinishKinds) {
  EngineUnderTest t(GetParam(), {.latent_blocks = 64, .context_tokens_max = 20});
  const auto prompt = RandomPrompt(6, 10, kVocab);
  const SequenceId plain = t.Add(GreedySpec(prompt, 5));
  const SequenceId context = t.Add(GreedySpec(prompt, 1000));
  t.RunAll();
  const auto five = t.results[plain].tokens;
  EXPECT_EQ(five.size(), 5u);
  EXPECT_EQ(t.results[plain].finish, FinishKind::kMaxTokens);
  EXPECT_EQ(t.results[context].tokens.size(), 10u);
  EXPECT_EQ(t.results[context].finish, FinishKind::kContextLimit);

  SequenceSpec stop = GreedySpec(prompt, 5);
  stop.stop_tokens = {-7, five[2]};
  const SequenceId stopped = t.Add(std::move(stop));
  t.RunAll();
  const auto& tokens = t.results[stopped].tokens;  // up to the first occurrence, included
  const auto first = std::find(five.begin(), five.end(), five[2]);
  EXPECT_EQ(tokens, std::vector<TokenId>(five.begin(), first + 1));
  EXPECT_EQ(t.results[stopped].finish, FinishKind::kStopToken);
  t.ExpectBaseline();
}

TEST_P(EngineTest, RefusesBeforeTakingAnything) {
  EngineUnderTest t(GetParam(), {.slabs = 2, .latent_blocks = 5, .context_tokens_max = 300});
  const auto refused = [&](SequenceSpec spec, absl::StatusCode code, const char* text) {
    const auto id = t.engine->Add(std::move(spec));
    EXPECT_EQ(id.status().code(), code) << id.status();
    EXPECT_THAT(std::string(id.status().message()), HasSubstr(text));
  };
  using absl::StatusCode;
  refused(GreedySpec({}, 1), StatusCode::kInvalidArgument, "prompt");
  refused(GreedySpec({1, static_cast<TokenId>(kVocab)}, 1), StatusCode::kInvalidArgument,
          "token 768 at 1");
  refused(GreedySpec({-1}, 1), StatusCode::kInvalidArgument, "token -1 at 0");
  refused(GreedySpec({1}, 0), StatusCode::kInvalidArgument, "max_tokens");
  refused(GreedySpec(RandomPrompt(1, 300, kVocab), 1), StatusCode::kInvalidArgument, "300");
  SequenceSpec bad = GreedySpec({1}, 1);
  bad.sampling.top_p = 0;
  refused(std::move(bad), StatusCode::kInvalidArgument, "top_p");
  SequenceSpec beyond;
  beyond.prompt = {1, 2};
  beyond.stop_at = 3;
  refused(std::move(beyond), StatusCode::kInvalidArgument, "stop_at");
  t.ExpectBaseline();

  t.Add(GreedySpec(RandomPrompt(2, 200, kVocab), 50));  // 249 positions: 4 blocks of 5
  refused(GreedySpec(RandomPrompt(3, 64, kVocab), 2), StatusCode::kResourceExhausted,
          "latent block pool");
  EXPECT_EQ(t.engine->pools().slabs->free_slots(), 1);
  t.Add(GreedySpec(RandomPrompt(4, 60, kVocab), 5));  // 64 positions: the last block
  refused(GreedySpec({1}, 1), StatusCode::kResourceExhausted, "slab pool");
  t.RunAll();
  t.ExpectBaseline();
}

TEST(EngineCreate, RefusesBoundsThatCannotHold) {
  Model& model = testing::GoldenModel("kimi_k3_tiny");
  ThreadPool pool(1);
  LocalExperts experts(&model.experts(), &pool);
  const auto message = [&](EngineOptions options) {
    return std::string(Engine::Create(&model, &experts, &pool, options).status().message());
  };
  EXPECT_THAT(message({.slabs = 0}), HasSubstr("slabs"));
  EXPECT_THAT(message({.step_tokens_max = 0}), HasSubstr("step_tokens_max"));
  EXPECT_THAT(message({.step_tokens_max = kForwardTokensMax + 1}), HasSubstr("at most 65536"));
  EXPECT_TRUE(CheckEngineOptions({.step_tokens_max = kForwardTokensMax}).ok());
  EXPECT_THAT(message({.chunk_tokens_max = 0}), HasSubstr("chunk_tokens_max"));
  EXPECT_THAT(message({.running_max = 0}), HasSubstr("running_max"));
  const std::string seats = message({.step_tokens_max = 32, .running_max = 33});
  for (const char* named :
       {"running_max: 33", "step_tokens_max=32", "--step-tokens to 33", "--running to 32"}) {
    EXPECT_THAT(seats, HasSubstr(named));
  }
  EXPECT_TRUE(CheckEngineOptions({.step_tokens_max = 32, .running_max = 32}).ok());
  EXPECT_THAT(message({.context_tokens_max = 1}), HasSubstr("context_tokens_max"));
  EXPECT_THAT(message({.latent_blocks = 100, .context_tokens_max = 6401}), HasSubstr("needs 101"));
}

TEST_P(EngineTest, RemoveFreesEverythingAtAnyMoment) {
  EngineUnderTest t(GetParam(), {.step_tokens_max = 40});
  for (int steps = 0; steps < 8; ++steps) {
    const SequenceId a = t.Add(GreedySpec(RandomPrompt(7, 100, kVocab), 20));
    const SequenceId b = t.Add(GreedySpec(RandomPrompt(8, 10, kVocab), 20));
    for (int i = 0; i < steps; ++i) t.Step();
    t.engine->Remove(a);
    t.engine->Remove(a);
    EXPECT_EQ(t.engine->state(a), nullptr);
    t.RunAll();
    EXPECT_EQ(t.results[b].tokens.size(), 20u);
    t.ExpectBaseline();
  }
}

TEST_P(EngineTest, FailingExpertsEndTheStepsSequencesOnly) {
  for (int fail_after = 1; fail_after < 40; fail_after += 3) {
    EngineUnderTest t(GetParam(), {.running_max = 2});
    const SequenceId a = t.Add(GreedySpec(RandomPrompt(9, 30, kVocab), 4));
    const SequenceId b = t.Add(GreedySpec(RandomPrompt(10, 5, kVocab), 30));
    const SequenceId waiting = t.Add(GreedySpec(RandomPrompt(11, 5, kVocab), 4));
    t.experts.fail_after = fail_after;
    t.RunAll();
    EXPECT_EQ(t.results[b].error.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(t.results[b].error.message()), HasSubstr("shard lost"));
    int lost = 0;
    for (const SequenceId id : {a, b, waiting}) lost += !t.results[id].error.ok();
    EXPECT_GE(lost, 1);
    EXPECT_LE(lost, 2);
    t.ExpectBaseline();
    // The engine goes on.
    const SequenceId next = t.Add(GreedySpec(RandomPrompt(9, 30, kVocab), 4));
    t.RunAll();
    EXPECT_EQ(t.results[next].tokens.size(), 4u);
  }
}

TEST_P(EngineTest, DamagedLogitsEndTheirSequenceOnly) {
  const auto prompt = RandomPrompt(12, 100, kVocab);
  EngineUnderTest whole(GetParam());
  const SequenceId reference = whole.Add(GreedySpec(prompt, 6));
  whole.RunAll();

  EngineUnderTest t(GetParam());
  SequenceSpec spec;
  spec.prompt = prompt;
  spec.stop_at = 64;
  const SequenceId source = t.Add(std::move(spec));
  t.RunAll();
  auto damaged = Move(*t.engine->state(source), t.engine->pools());
  damaged->slab_layer(0).s[5] = NAN;
  SequenceSpec rest = GreedySpec(prompt, 6);
  rest.state = std::move(damaged);
  const SequenceId bad = t.Add(std::move(rest));
  const SequenceId good = t.Add(GreedySpec(prompt, 6));
  t.RunAll();
  EXPECT_EQ(t.results[bad].error.code(), absl::StatusCode::kDataLoss) << t.results[bad].error;
  EXPECT_TRUE(t.results[bad].tokens.empty());
  EXPECT_EQ(t.results[good], whole.results[reference]);
  t.engine->Remove(source);
  t.ExpectBaseline();
}

TEST_P(EngineTest, ARestoredStateMustLeaveSomethingToCompute) {
  EngineUnderTest t(GetParam());
  SequenceSpec spec;
  spec.prompt = RandomPrompt(13, 64, kVocab);
  spec.stop_at = 64;
  const SequenceId source = t.Add(std::move(spec));
  t.RunAll();
  SequenceSpec rest = GreedySpec(RandomPrompt(13, 64, kVocab), 6);
  rest.state = Move(*t.engine->state(source), t.engine->pools());
  EXPECT_EQ(t.engine->Add(std::move(rest)).status().code(), absl::StatusCode::kInvalidArgument);
  t.engine->Remove(source);
  t.ExpectBaseline();
}

}  // namespace
}  // namespace deltamesh
