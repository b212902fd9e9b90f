// The prompts of `bench-router`.
#pragma once

#include <cstdint>

namespace deltamesh {

// Token `t` of prompt `i`: ordinary text in every vocabulary.
inline int32_t BenchToken(int64_t t, int64_t i) {
  return static_cast<int32_t>(64 + (t * 7 + i + 1) % 50);
}

}  // namespace deltamesh
