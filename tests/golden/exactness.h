// The exactness law (one function per clause): a sequence's logits and state have the same bits however
// its tokens were fed, whatever shared its steps, and with any number of threads.
#pragma once

#include <cstdint>

#include "tests/golden/model_runner.h"

namespace deltamesh {

// What one call with one thread gives.
struct Truth {
  Tokens tokens;
  std::vector<float> logits;  // [tokens, vocab]
  std::vector<float> state;   // StateFloats after the last token
};
Truth TruthOf(ModelRunner& runner, const Tokens& tokens);

// Each adds gtest failures that name the clause, the length and the split.
void ExpectStepwiseIsTheSame(ModelRunner& runner, const Truth& truth);
void ExpectSplitsAreTheSame(ModelRunner& runner, const Truth& truth, int splits, uint32_t seed);
// Cuts at and around `boundary` and its multiples.
void ExpectCutsAroundAreTheSame(ModelRunner& runner, const Truth& truth, int64_t boundary);
// The tokens in random chunks, each step shared with others that stand at other positions, in random order.
void ExpectCompanyChangesNothing(ModelRunner& runner, const Truth& truth, uint32_t seed);
// Logits of only the last positions of a call.
void ExpectFewerLogitsAreTheSame(ModelRunner& runner, const Truth& truth);

// All of the above for lengths around tile and block boundaries, with 1, 2 and 3 threads.
void ExpectExactness(ModelRunner& runner, const Sizes& lengths, uint32_t seed);

}  // namespace deltamesh
