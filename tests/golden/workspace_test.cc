// The scratch stack of forward passes.
#include "runtime/model/workspace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace deltamesh {
namespace {

TEST(Workspace, BuffersAreAlignedAndDoNotOverlap) {
  std::mt19937 random(1);
  Workspace ws;
  for (int step = 0; step < 5; ++step) {
    Workspace::Scope scope(ws);
    std::vector<std::pair<float*, int64_t>> taken;
    for (int i = 0; i < 50; ++i) {
      const auto count = static_cast<int64_t>(random() % 100000);
      float* p = ws.Floats(count);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0u);
      std::fill_n(p, count, static_cast<float>(i));
      taken.emplace_back(p, count);
    }
    for (size_t i = 0; i < taken.size(); ++i) {
      const auto [p, count] = taken[i];
      EXPECT_EQ(std::count(p, p + count, static_cast<float>(i)), count);
    }
  }
}

TEST(Workspace, InnerScopesGiveBackOnlyTheirOwn) {
  Workspace ws;
  const Workspace::Scope outer(ws);
  float* kept = ws.Floats(1000);
  std::fill_n(kept, 1000, 7.0f);
  float* first = nullptr;
  for (int i = 0; i < 3; ++i) {
    const Workspace::Scope inner(ws);
    float* p = ws.Floats(5000);
    if (first == nullptr) first = p;
    EXPECT_EQ(p, first);
    std::fill_n(p, 5000, 1.0f);
  }
  EXPECT_EQ(std::count(kept, kept + 1000, 7.0f), 1000);
}

// A larger step grows it once, to what that step needed; smaller and equal steps leave it as it is.
TEST(Workspace, HoldsWhatTheLargestStepNeeded) {
  Workspace ws;
  const auto step = [&](int64_t floats) {
    const Workspace::Scope scope(ws);
    ws.Floats(floats);
    for (int layer = 0; layer < 3; ++layer) {
      const Workspace::Scope inner(ws);
      ws.Floats(4 * floats);
    }
  };
  step(1 << 20);
  const int64_t large = ws.bytes();
  EXPECT_EQ(large, 5 * (int64_t{4} << 20));
  for (const int64_t floats : {1 << 20, 1 << 10, 1 << 19, 1 << 20}) {
    step(floats);
    EXPECT_EQ(ws.bytes(), large);
  }
}

TEST(Workspace, TakingOutsideAScopeStopsTheProcess) {
  Workspace ws;
  EXPECT_DEATH(ws.Floats(1), "scopes");
}

}  // namespace
}  // namespace deltamesh
