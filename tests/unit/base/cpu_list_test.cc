#include "runtime/base/cpu_list.h"

#include <sched.h>

#include <thread>

#include "gtest/gtest.h"

namespace deltamesh {
namespace {

TEST(CpuList, NamesNumbersAndRanges) {
  EXPECT_EQ(ParseCpuList("").value(), std::vector<int>());
  EXPECT_EQ(ParseCpuList("5").value(), std::vector<int>{5});
  EXPECT_EQ(ParseCpuList("8,0-3,2").value(), (std::vector<int>{0, 1, 2, 3, 8}));
}

TEST(CpuList, RefusesWhatIsNone) {
  for (const char* text : {",", "1,", "a", "-1", "3-1", "1-2-3", "1024", "0-99999999999", "1 2"}) {
    EXPECT_EQ(ParseCpuList(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(CpuList, BindsThreadsThatStartLater) {
  std::thread([] {
    cpu_set_t allowed;
    ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    int cpu = 0;
    while (!CPU_ISSET(static_cast<size_t>(cpu), &allowed)) ++cpu;
    ASSERT_TRUE(BindThisThread(std::vector<int>{cpu}).ok());
    std::thread([cpu] {
      cpu_set_t set;
      ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
      EXPECT_EQ(CPU_COUNT(&set), 1);
      EXPECT_TRUE(CPU_ISSET(static_cast<size_t>(cpu), &set));
    }).join();
    EXPECT_EQ(BindThisThread(std::vector<int>{CPU_SETSIZE - 1}).code(),
              absl::StatusCode::kInvalidArgument);
    // One that is there does not make up for one that is not.
    const absl::Status some = BindThisThread(std::vector<int>{cpu, CPU_SETSIZE - 1});
    EXPECT_EQ(some.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(some.message()).find("cpus: 1023 of "), std::string::npos) << some;
  }).join();
}

}  // namespace
}  // namespace deltamesh
