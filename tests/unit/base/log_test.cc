#include "runtime/base/log.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace deltamesh {
namespace {

std::string Capture(LogLevel level, void (*body)()) {
  testing::internal::CaptureStderr();
  InitLog("decode", level);
  body();
  return testing::internal::GetCapturedStderr();
}

TEST(Log, OneLineOfFields) {
  const std::string line = Capture(LogLevel::kInfo, [] {
    LogInfo("handoff.complete",
            {{"request", "r-1"}, {"bytes", 4096}, {"seconds", 0.25}, {"ok", true}});
  });
  EXPECT_NE(line.find(" decode handoff.complete request=r-1 bytes=4096 seconds=0.25 ok=true\n"),
            std::string::npos)
      << line;
}

TEST(Log, TextFromOutsideCannotForgeALine) {
  const std::string line = Capture(LogLevel::kInfo, [] {
    LogInfo("request", {{"id", "a\nerror fake=1"}, {"empty", ""}, {"quote", "say \"x\""}});
  });
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
  EXPECT_NE(line.find("id=\"a\\x0aerror fake=1\" empty=\"\" quote=\"say \\\"x\\\"\""),
            std::string::npos)
      << line;
}

TEST(Log, LevelsBelowTheLimitAreDropped) {
  const std::string text = Capture(LogLevel::kWarning, [] {
    LogInfo("quiet");
    LogError("loud");
  });
  EXPECT_EQ(text.find("quiet"), std::string::npos);
  EXPECT_NE(text.find("loud"), std::string::npos);
}

}  // namespace
}  // namespace deltamesh
