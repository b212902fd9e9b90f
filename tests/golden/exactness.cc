#include "tests/golden/exactness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace deltamesh {

namespace {

int64_t Length(const Truth& truth) { return static_cast<int64_t>(truth.tokens.size()); }

std::string Describe(const char* clause, const Truth& truth, const Sizes& sizes) {
  std::string text =
      std::string(clause) + ", " + std::to_string(truth.tokens.size()) + " tokens as";
  for (const int64_t s : sizes) text += " " + std::to_string(s);
  return text;
}

void ExpectFeed(ModelRunner& runner, const Truth& truth, const Sizes& sizes, const char* clause) {
  const auto state = runner.NewState(Length(truth));
  const std::vector<float> logits = runner.Feed(*state, truth.tokens, sizes);
  EXPECT_TRUE(SameBits(logits, truth.logits)) << "logits: " << Describe(clause, truth, sizes);
  EXPECT_TRUE(SameBits(StateFloats(*state), truth.state))
      << "state: " << Describe(clause, truth, sizes);
}

// A sequence that shares steps with the one under test, always moving on.
struct Companion {
  std::unique_ptr<SequenceState> state;
  Tokens tokens;  // of the next chunk
  std::vector<float> logits;
};

constexpr int64_t kCompanionRoom = 384;

Companion NewCompanion(ModelRunner& runner, std::mt19937& random) {
  Companion c{runner.NewState(kCompanionRoom), {}, {}};
  const auto start = static_cast<int64_t>(random() % 100);
  if (start > 0) runner.FeedAll(*c.state, RandomTokens(random, start, runner.vocab()));
  return c;
}

SequenceChunk NextChunk(Companion& c, ModelRunner& runner, std::mt19937& random) {
  const bool prompt = random() % 3 == 0;
  const int64_t size = prompt ? 1 + static_cast<int64_t>(random() % 20) : 1;
  if (c.state->position() + size > kCompanionRoom) c.state = runner.NewState(kCompanionRoom);
  c.tokens = RandomTokens(random, size, runner.vocab());
  c.logits.resize(static_cast<size_t>(runner.vocab()));
  SequenceChunk chunk;
  chunk.state = c.state.get();
  chunk.tokens = c.tokens;
  chunk.logits = static_cast<int64_t>(random() % 2);
  chunk.out = c.logits.data();
  return chunk;
}

}  // namespace

Truth TruthOf(ModelRunner& runner, const Tokens& tokens) {
  ModelRunner alone(runner, 1);
  Truth truth{tokens, {}, {}};
  const auto state = alone.NewState(Length(truth));
  truth.logits = alone.FeedAll(*state, tokens);
  truth.state = StateFloats(*state);
  return truth;
}

void ExpectStepwiseIsTheSame(ModelRunner& runner, const Truth& truth) {
  ExpectFeed(runner, truth, Sizes(truth.tokens.size(), 1), "token by token");
}

void ExpectSplitsAreTheSame(ModelRunner& runner, const Truth& truth, int splits, uint32_t seed) {
  std::mt19937 random(seed);
  for (int i = 0; i < splits; ++i) {
    const int64_t largest = i % 2 == 0 ? Length(truth) : 9;
    ExpectFeed(runner, truth, RandomSizes(random, Length(truth), largest), "random split");
  }
}

void ExpectCutsAroundAreTheSame(ModelRunner& runner, const Truth& truth, int64_t boundary) {
  for (const int64_t shift : {-1, 0, 1}) {
    Sizes sizes;
    int64_t done = 0;
    for (int64_t cut = boundary + shift; cut < Length(truth); cut += boundary) {
      sizes.push_back(cut - done);
      done = cut;
    }
    sizes.push_back(Length(truth) - done);
    ExpectFeed(runner, truth, sizes, "cuts around a boundary");
  }
}

void ExpectCompanyChangesNothing(ModelRunner& runner, const Truth& truth, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Companion> company;
  for (int i = 0; i < 4; ++i) company.push_back(NewCompanion(runner, random));
  const auto state = runner.NewState(Length(truth));
  const auto vocab = static_cast<size_t>(runner.vocab());
  std::vector<float> logits(truth.logits.size());
  size_t done = 0;
  const Sizes sizes = RandomSizes(random, Length(truth), 12);
  for (const int64_t size : sizes) {
    std::vector<SequenceChunk> batch(1);
    batch[0].state = state.get();
    batch[0].tokens = std::span(truth.tokens).subspan(done, static_cast<size_t>(size));
    batch[0].logits = size;
    batch[0].out = logits.data() + done * vocab;
    for (Companion& c : company) {
      if (random() % 4 != 0) batch.push_back(NextChunk(c, runner, random));
    }
    std::shuffle(batch.begin(), batch.end(), random);
    runner.Forward(batch);
    done += static_cast<size_t>(size);
  }
  EXPECT_TRUE(SameBits(logits, truth.logits)) << "logits: " << Describe("in company", truth, sizes);
  EXPECT_TRUE(SameBits(StateFloats(*state), truth.state))
      << "state: " << Describe("in company", truth, sizes);
}

void ExpectFewerLogitsAreTheSame(ModelRunner& runner, const Truth& truth) {
  for (const int64_t wanted : {int64_t{0}, int64_t{1}, Length(truth) / 2}) {
    const auto state = runner.NewState(Length(truth));
    const auto values = static_cast<size_t>(wanted * runner.vocab());
    std::vector<float> logits(values);
    SequenceChunk chunk;
    chunk.state = state.get();
    chunk.tokens = truth.tokens;
    chunk.logits = wanted;
    chunk.out = logits.data();
    runner.Forward({&chunk, 1});
    EXPECT_TRUE(SameBits(logits, std::span(truth.logits).last(values)))
        << "the last " << wanted << " of " << Length(truth);
    EXPECT_TRUE(SameBits(StateFloats(*state), truth.state));
  }
}

void ExpectExactness(ModelRunner& runner, const Sizes& lengths, uint32_t seed) {
  std::mt19937 random(seed);
  for (const int64_t length : lengths) {
    const Truth truth = TruthOf(runner, RandomTokens(random, length, runner.vocab()));
    for (const int threads : {1, 2, 3}) {
      SCOPED_TRACE("threads: " + std::to_string(threads));
      ModelRunner other(runner, threads);
      ExpectFeed(other, truth, {length}, "one call");
      ExpectStepwiseIsTheSame(other, truth);
      ExpectSplitsAreTheSame(other, truth, 4, static_cast<uint32_t>(random()));
      ExpectCompanyChangesNothing(other, truth, static_cast<uint32_t>(random()));
    }
    ExpectCutsAroundAreTheSame(runner, truth, kTileTokens);
    ExpectCutsAroundAreTheSame(runner, truth, kBlockTokens);
    ExpectFewerLogitsAreTheSame(runner, truth);
  }
}

}  // namespace deltamesh
