// golden.json and golden.bin of one checkpoint: what the float64 oracle computed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/golden/model_runner.h"

namespace deltamesh {

// Order-sensitive sums of an array in row-major order, in float64: wsum weighs element i with
// ((i * 2654435761) mod 2^32) / 2^32 - 1/2.
struct Checksums {
  int64_t n = 0;
  double sum = 0, l2 = 0, wsum = 0;
};
Checksums ChecksumsOf(std::span<const float> values);
// When every element is off by at most `error`: what each sum can be off by at most, as a reason why the
// two differ too much; empty when they do not.
std::string Disagreement(const Checksums& want, const Checksums& got, double error);

struct GoldenTensor {
  std::string name;  // "S", "conv", "latent" or "k_rope"
  int64_t layer;
  Checksums checks;
  std::vector<float> values;  // empty when only the checksums were stored
};

struct GoldenPosition {
  int64_t position;
  std::vector<float> logits;
  std::vector<std::pair<TokenId, double>> top;
};

struct GoldenPrompt {
  Tokens tokens;
  bool wide_margin;
  Tokens argmax;  // per position
  std::vector<GoldenPosition> positions;
  Checksums logits_checks;
  std::vector<GoldenTensor> state;
};

struct GoldenGreedy {
  Tokens prompt, tokens;
  std::vector<float> last_logits;  // after the last token was fed too
};

struct GoldenFile {
  std::vector<GoldenPrompt> prompts;
  std::vector<GoldenGreedy> greedy;

  static GoldenFile Load(const std::string& folder);
};

}  // namespace deltamesh
