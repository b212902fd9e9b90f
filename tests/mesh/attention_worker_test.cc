// What prefill and decode workers check before they load anything.
#include "services/worker/attention_worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

TEST(FinishEngineOptions, NeverPromisesMoreContextThanTheModelHas) {
  EngineOptions options;
  options.context_tokens_max = 8192;
  ASSERT_TRUE(FinishEngineOptions(4096, &options).ok());
  EXPECT_EQ(options.context_tokens_max, 4096);
  options.context_tokens_max = 100;
  ASSERT_TRUE(FinishEngineOptions(4096, &options).ok());
  EXPECT_EQ(options.context_tokens_max, 100);
  options.context_tokens_max = 8192;
  ASSERT_TRUE(FinishEngineOptions(0, &options).ok());  // the model does not say
  EXPECT_EQ(options.context_tokens_max, 8192);
}

TEST(FinishEngineOptions, RefusesBoundsThatCannotHold) {
  EngineOptions options;
  options.step_tokens_max = kForwardTokensMax + 1;
  const absl::Status steps = FinishEngineOptions(4096, &options);
  EXPECT_EQ(steps.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(steps.message()), HasSubstr("step_tokens_max: 65537"));
  options = {};
  options.latent_blocks = 63;
  EXPECT_FALSE(FinishEngineOptions(4096, &options).ok());  // 64 blocks after lowering
  options.latent_blocks = 64;
  EXPECT_TRUE(FinishEngineOptions(4096, &options).ok());
}

}  // namespace
}  // namespace deltamesh
