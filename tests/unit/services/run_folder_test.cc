// Folders of killed processes go when the next one begins, and no others do.
#include "services/cli/run_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/time/clock.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string parent = (fs::temp_directory_path() / "deltamesh-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(parent.data()), nullptr);
    parent_ = parent;
    setenv("TMPDIR", parent_.c_str(), 1);
  }
  void TearDown() override {
    unsetenv("TMPDIR");
    fs::remove_all(parent_);
  }
  // The number of a process that has ended.
  static pid_t Dead() {
    const pid_t pid = fork();
    if (pid == 0) _exit(0);
    waitpid(pid, nullptr, 0);
    return pid;
  }
  std::string Make(const std::string& name) {
    const std::string path = parent_ + "/" + name;
    fs::create_directories(path + "/run");
    std::ofstream(path + "/run/log") << "x";
    return path;
  }
  int Sweep(absl::Duration later = absl::Minutes(2)) {
    return RunFolder::RemoveAbandoned(parent_, absl::Now() + later);
  }

  std::string parent_;
};

TEST_F(RunFolderTest, IsRemovedAtTheEnd) {
  std::string path;
  {
    const auto folder = RunFolder::Create();
    ASSERT_TRUE(folder.ok()) << folder.status();
    path = (*folder)->path();
    EXPECT_TRUE(path.starts_with(parent_ + "/deltamesh-run-" + std::to_string(getpid()) + "-"));
    std::ofstream(path + "/log") << "x";
    EXPECT_EQ(Sweep(), 0);
    EXPECT_TRUE(fs::exists(path));
  }
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(RunFolderTest, AKilledProcessesFolderGoesLater) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto folder = RunFolder::Create();
    const char word = folder.ok() ? 'y' : 'n';
    if (write(ready[1], &word, 1) == 1) pause();
    _exit(1);
  }
  char word = 0;
  ASSERT_EQ(read(ready[0], &word, 1), 1);
  ASSERT_EQ(word, 'y');
  const std::string path = fs::directory_iterator(parent_)->path().string();
  EXPECT_EQ(Sweep(), 0);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(Sweep(absl::ZeroDuration()), 0);  // too young
  EXPECT_TRUE(fs::exists(path));
  EXPECT_EQ(Sweep(), 1);
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(RunFolderTest, OnlyAbandonedFoldersOfThisKindGo) {
  const std::string pid = std::to_string(Dead());
  const std::string gone = Make("deltamesh-run-" + pid + "-abcdef");
  const std::string locked = Make("deltamesh-run-" + pid + "-locked");
  const int lock = open(locked.c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(flock(lock, LOCK_EX | LOCK_NB), 0);
  const std::string others[] = {
      locked,
      Make("deltamesh-run-" + std::to_string(getppid()) + "-abcdef"),
      Make("deltamesh-run-" + pid + "-abcdefg"),
      Make("deltamesh-run-" + pid + "-abcde"),
      Make("deltamesh-run-" + pid),
      Make("deltamesh-run--1-abcdef"),
      Make("deltamesh-run-0-abcdef"),
      Make("deltamesh-run-" + pid + "x-abcdef"),
      Make("deltamesh-" + pid + "-abcdef"),
      Make("elsewhere"),
  };
  // A link, which anyone can make, leads nowhere.
  fs::create_directory_symlink(parent_ + "/elsewhere",
                               parent_ + "/deltamesh-run-" + pid + "-linked");
  std::ofstream(parent_ + "/deltamesh-run-" + pid + "-afile0") << "x";
  EXPECT_EQ(Sweep(), 1);
  EXPECT_FALSE(fs::exists(gone));
  for (const std::string& path : others) EXPECT_TRUE(fs::exists(path + "/run/log")) << path;
  EXPECT_TRUE(fs::exists(parent_ + "/deltamesh-run-" + pid + "-afile0"));
  close(lock);
  EXPECT_EQ(Sweep(), 1);
  EXPECT_FALSE(fs::exists(locked));
}

}  // namespace
}  // namespace deltamesh
