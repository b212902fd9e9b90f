// The bar of conditional disaggregation, as results/ of tools/bench has it: the planner loses to always and
// to never handing over in none of the cases. In a tenth of the traffic single cases are a matter of luck.
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "services/simulate/disaggregation.h"

namespace deltamesh {
namespace {

TEST(PlannerTest, LosesNowhere) {
  InitLog("simulate", LogLevel::kError);
  DisaggregationOptions options;
  options.base.prefill_workers = options.base.decode_workers = 4;
  options.base.cache_bytes = 300e9;
  options.scale = 0.25;
  const auto document = CompareDisaggregation(options, nullptr);
  ASSERT_TRUE(document.ok()) << document.status();
  ASSERT_EQ((*document)["cases"].size(), 12u);
  for (const auto& c : (*document)["cases"]) {
    EXPECT_FALSE(c["planned"]["loses"].get<bool>()) << c.dump(1);
  }
}

}  // namespace
}  // namespace deltamesh
