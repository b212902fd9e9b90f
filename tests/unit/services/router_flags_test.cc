// Each number of a router's flags has a range, told where it is left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "services/router/router_process.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

// What is wrong with it; empty: nothing.
std::string Refused(const std::string& flag) {
  CLI::App app;
  RouterFlags flags;
  AddRouterFlags(&app, &flags);
  try {
    app.parse(std::vector<std::string>{flag, "--model=m"});
  } catch (const CLI::ParseError& e) {
    return e.what();
  }
  return "";
}

TEST(RouterFlagsTest, WhatIsNoNumberOrTooLargeIsRefused) {
  for (const std::string flag :
       {"--ageing-seconds", "--waiting-seconds", "--request-seconds", "--heartbeat-seconds",
        "--lease-seconds", "--drain-seconds", "--store-forget-minutes"}) {
    for (const char* value : {"nan", "inf", "-1", "x", "1e30"}) {
      EXPECT_THAT(Refused(flag + "=" + value), HasSubstr(flag)) << value;
    }
    EXPECT_EQ(Refused(flag + "=1"), "");
  }
  EXPECT_EQ(Refused("--drain-seconds=0"), "");
  EXPECT_THAT(Refused("--lease-seconds=0"), HasSubstr("use 0.001 to 1,000,000,000 seconds"));
  for (const std::string flag :
       {"--live-requests", "--waiting-requests", "--waiting-tokens", "--turn-tokens",
        "--handoff-attempts", "--prompt-tokens", "--sessions", "--session-mib", "--session-calls",
        "--decisions", "--http-threads", "--http-connections", "--http-body-bytes",
        "--encode-threads", "--encode-queue"}) {
    // 2^44 MiB are 2^64 bytes, which would be none.
    for (const char* value : {"0", "-1", "1.5", "nan", "17592186044416"}) {
      EXPECT_THAT(Refused(flag + "=" + value), HasSubstr(flag)) << value;
    }
    EXPECT_EQ(Refused(flag + "=1"), "");
  }
  EXPECT_THAT(Refused("--handoff-attempts=17"), HasSubstr("use 1 to 16 hand-offs"));
}

}  // namespace
}  // namespace deltamesh
