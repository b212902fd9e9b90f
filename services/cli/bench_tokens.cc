#include "services/cli/bench_tokens.h"

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int64_t kSpecialIds = 16;

uint64_t Mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace

TokenId BenchToken(uint64_t sequence, uint64_t position, int64_t vocab) {
  return static_cast<TokenId>(Mix((sequence << 32) ^ position) %
                              static_cast<uint64_t>(vocab - kSpecialIds));
}

absl::Status CheckBenchVocab(int64_t vocab) {
  if (vocab > kSpecialIds) return absl::OkStatus();
  return FailedPrecondition("model: a vocabulary of %d leaves no ids to feed; use more than %d",
                            vocab, kSpecialIds);
}

}  // namespace deltamesh
