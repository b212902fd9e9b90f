// What is said of an engine's steps.
#include "services/worker/engine_steps.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "runtime/base/clock.h"
#include "tests/unit/engine/engine_fixture.h"

namespace deltamesh {
namespace {

class ManualClock final : public Clock {
 public:
  absl::Time Now() const override { return now; }
  absl::Time now = absl::FromUnixSeconds(1000);
};

// The engine takes as long as the callback that it makes within a step; the core takes a second around each.
TEST(EngineSteps, TimesTheEngineAndNothingAroundIt) {
  ManualClock clock;
  testing::EngineUnderTest t("kimi_k3_tiny");
  EngineSteps steps(t.engine.get(), &clock);
  const auto step = [&]() -> std::optional<absl::Duration> {
    clock.now += absl::Seconds(1);
    steps.Step(clock.now);
    clock.now += absl::Seconds(1);
    return steps.step_time();
  };
  EXPECT_FALSE(step().has_value()) << "nothing to do";

  SequenceSpec spec = testing::GreedySpec(testing::RandomPrompt(1, 100, 768), 2);
  spec.cuts = {64};
  spec.at_cut = [&clock](const SequenceState&) { clock.now += absl::Milliseconds(5); };
  t.Add(std::move(spec));
  EXPECT_EQ(step(), absl::Milliseconds(5)) << "the prompt, and the first token";
  EXPECT_EQ(step(), absl::ZeroDuration()) << "the second token";
  EXPECT_FALSE(step().has_value()) << "nothing to do any more";
}

}  // namespace
}  // namespace deltamesh
