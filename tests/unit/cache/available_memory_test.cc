#include "runtime/cache/available_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "runtime/cache/sequence_state.h"

namespace deltamesh {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class AvailableMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/available_memory_XXXXXX";
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = root_ + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  int64_t Available() {
    auto available = AvailableMemory(root_);
    EXPECT_TRUE(available.ok()) << available.status();
    return available.value_or(-1);
  }

  std::string root_;
};

TEST_F(AvailableMemoryTest, TheMachinesWithoutAGroup) {
  EXPECT_EQ(AvailableMemory(root_).status().code(), absl::StatusCode::kNotFound);
  Write("/proc/meminfo", "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:   300 kB\nX: 1 kB\n");
  EXPECT_EQ(Available(), 300 * 1024);
}

TEST_F(AvailableMemoryTest, TheTightestGroupAboveCounts) {
  Write("/proc/meminfo", "MemAvailable:   1048576 kB\n");
  Write("/proc/self/cgroup", "3:cpu:/\n0::/a/b\n");
  EXPECT_EQ(Available(), 1024 * kMiB) << "no files, no limit";
  Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("/sys/fs/cgroup/a/b/memory.current", "5\n");
  EXPECT_EQ(Available(), 1024 * kMiB);
  Write("/sys/fs/cgroup/a/memory.max", std::to_string(500 * kMiB));
  Write("/sys/fs/cgroup/a/memory.current", std::to_string(300 * kMiB));
  EXPECT_EQ(Available(), 200 * kMiB);
  Write("/sys/fs/cgroup/a/memory.stat", "anon 7\nfile " + std::to_string(100 * kMiB) + "\nx 1\n");
  EXPECT_EQ(Available(), 300 * kMiB) << "page cache can be dropped";
  Write("/sys/fs/cgroup/memory.max", std::to_string(250 * kMiB));
  Write("/sys/fs/cgroup/memory.current", std::to_string(240 * kMiB));
  EXPECT_EQ(Available(), 10 * kMiB) << "in a container its own group is the root";
}

TEST(StatePoolsTest, PoolsThatCannotBeBackedAreRefusedAtOnce) {
  StateLayout layout;
  layout.kda_layers = 1;
  layout.heads = 1;
  layout.dim = 16;
  layout.conv_taps = 4;
  layout.mla_layers = 1;
  layout.rank = 1 << 14;  // 4 MiB a block
  layout.rope = 0;
  ASSERT_TRUE(StatePools::Create(layout, 2, 2).ok());
  const int64_t available = *AvailableMemory();
  const absl::Status refused =
      StatePools::Create(layout, 2, 2 * available / layout.block_bytes() + 1).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"latent block pool", "bytes", "available", "--latent-blocks"}) {
    EXPECT_NE(refused.message().find(part), absl::string_view::npos) << refused << part;
  }
}

}  // namespace
}  // namespace deltamesh
