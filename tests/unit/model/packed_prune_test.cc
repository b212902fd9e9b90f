// The bound of the folder of packed files: who goes first, and who never goes.
#include "runtime/model/packed_prune.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

class PackedPruneTest : public testing::Test {
 protected:
  PackedPruneTest() : folder_(testing::TempDir() + "prune-" + std::to_string(getpid()) + "/") {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~PackedPruneTest() override { fs::remove_all(folder_); }

  // A file of 1000 bytes last used `used` seconds after the epoch, and written at another time.
  std::string Make(const std::string& name, time_t used) {
    std::ofstream(folder_ + name) << std::string(1000, 'x');
    const timespec times[2] = {{.tv_sec = used, .tv_nsec = 0},
                               {.tv_sec = 5000 - used, .tv_nsec = 0}};
    CHECK(utimensat(AT_FDCWD, (folder_ + name).c_str(), times, 0) == 0, "%s", name);
    return folder_ + name;
  }
  int64_t Prune(int64_t bytes_max, int64_t bytes_freed = 0, const std::string& keep = "") {
    notes_.clear();
    return PrunePacked({folder_, folder_ + keep, bytes_max, bytes_freed},
                       [this](std::string_view line) { notes_.emplace_back(line); });
  }
  std::vector<std::string> Left() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (!entry.path().string().ends_with(".lock")) names.push_back(entry.path().filename());
    }
    return names;
  }

  const std::string folder_;
  std::vector<std::string> notes_;
};

TEST_F(PackedPruneTest, TheLeastRecentlyUsedGoUntilTheBoundHolds) {
  Make("b.packed", 200);
  Make("a.packed", 300);
  Make("c.packed", 100);
  EXPECT_EQ(Prune(3000), 0);
  EXPECT_THAT(Left(), UnorderedElementsAre("a.packed", "b.packed", "c.packed"));
  EXPECT_EQ(Prune(2999), 1000);
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("c.packed: removed")));
  EXPECT_THAT(Left(), UnorderedElementsAre("a.packed", "b.packed"));
  EXPECT_EQ(Prune(3000, 1), 1000);  // within the bound, but the disk is full
  EXPECT_THAT(Left(), UnorderedElementsAre("a.packed"));
  EXPECT_EQ(Prune(0), 1000);
  EXPECT_THAT(Left(), ElementsAre());
}

TEST_F(PackedPruneTest, WhatAProcessHoldsOrPacksStays) {
  const std::string held = Make("held.packed", 1);
  Make("packing.packed", 2);
  Make("kept.packed", 3);
  Make("free.packed", 4);
  const int fd = open(held.c_str(), O_RDONLY);
  ASSERT_TRUE(HoldPacked(fd));
  const int lock = open((folder_ + "packing.packed.lock").c_str(), O_RDWR | O_CREAT, 0644);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  EXPECT_EQ(Prune(0, 0, "kept.packed"), 1000);
  EXPECT_THAT(Left(), UnorderedElementsAre("held.packed", "packing.packed", "kept.packed"));
  close(fd);
  close(lock);
  EXPECT_EQ(Prune(0, 0, "kept.packed"), 2000);
}

TEST_F(PackedPruneTest, HoldingSetsTheTimeOfUseAndSeesARemovedName) {
  const std::string old = Make("old.packed", 1);
  Make("new.packed", 1000);
  int fd = open(old.c_str(), O_RDONLY);
  ASSERT_TRUE(HoldPacked(fd));
  const int late = open(old.c_str(), O_RDONLY);
  EXPECT_TRUE(HoldPacked(late));  // two processes share it
  close(fd);
  close(late);
  EXPECT_EQ(Prune(1000), 1000);
  EXPECT_THAT(Left(), ElementsAre("old.packed"));
  fd = open(old.c_str(), O_RDONLY);
  EXPECT_EQ(Prune(0), 1000);
  EXPECT_FALSE(HoldPacked(fd));
  close(fd);
}

TEST_F(PackedPruneTest, WhatTheDeadLeftGoesAndForeignFilesStay) {
  Make("a.packed.77.partial", 9);
  Make("b.packed.78.partial", 9);
  Make("c.packed", 1);
  Make("notes.txt", 1);
  Make("x.partial", 1);
  Make("d.digest", 1);
  fs::create_directory(folder_ + "e.packed");
  fs::create_symlink(folder_ + "notes.txt", folder_ + "f.packed");
  const int lock = open((folder_ + "b.packed.lock").c_str(), O_RDWR | O_CREAT, 0644);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);  // b's packer lives
  EXPECT_EQ(Prune(1 << 20), 1000);
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("a process left when it died")));
  EXPECT_THAT(Left(), UnorderedElementsAre("b.packed.78.partial", "c.packed", "notes.txt",
                                           "x.partial", "d.digest", "e.packed", "f.packed"));
  close(lock);
}

// Whoever packs a file again removes what was left of it, under the lock that it holds itself.
TEST_F(PackedPruneTest, WhatTheDeadLeftOfTheKeptFileGoes) {
  Make("kept.packed", 1);
  Make("kept.packed.77.partial", 9);
  const int lock = open((folder_ + "kept.packed.lock").c_str(), O_RDWR | O_CREAT, 0644);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  EXPECT_EQ(Prune(1 << 20, 0, "kept.packed"), 1000);
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("kept.packed.77.partial")));
  EXPECT_THAT(Left(), ElementsAre("kept.packed"));
  close(lock);
}

TEST_F(PackedPruneTest, AFolderThatIsNotThereIsNoError) {
  EXPECT_EQ(PrunePacked({folder_ + "none", "", 0, 0}, nullptr), 0);
}

}  // namespace
}  // namespace deltamesh
