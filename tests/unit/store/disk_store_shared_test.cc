// Several processes on one folder at once: every read is right or a clear miss, and the bound holds.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/log.h"
#include "runtime/store/disk_store.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;
using testing::TestFolder;
using testing::TestPath;
using testing::TestState;
using testing::TestTarget;

constexpr int64_t kBound =
    30000;  // a state of 7 blocks has about 5000, and four may be written at once

std::unique_ptr<DiskStore> OpenStore(const std::string& folder, const Clock* clock,
                                     absl::Duration lock_max = StoreFolder::kLockMax) {
  DiskStoreOptions options;
  options.folder = folder;
  options.bytes_max = kBound;
  options.identity = testing::TinyIdentity();
  options.lock_max = lock_max;
  auto store = DiskStore::Open(options, clock);
  CHECK_OK(store.status());
  return *std::move(store);
}

// Exits with what went wrong: 1 a failed write, 2 a wrong byte, 3 a refusal, 4 nothing was ever read.
int Traffic(const std::string& folder, uint64_t seed) {
  SystemClock clock;
  auto store = OpenStore(folder, &clock);
  SeededEntropy random(seed);
  int read = 0;
  for (int step = 0; step < 250; ++step) {
    std::vector<PrefixKey> path = TestPath(random.Next() % 5, 7, 3);
    path.resize(1 + random.Next() % 7);
    if (step % 5 == 0) store->Scan();
    if (const int64_t found = store->Find(path).snapshot.value(); found > 0) {
      TestTarget target({path.begin(), path.begin() + found});
      const absl::Status status = store->Read(target.target(), nullptr).status();
      if (status.ok() && !target.Right()) return 2;
      if (!status.ok() && !absl::IsNotFound(status)) return 3;
      read += status.ok();
    }
    const absl::Status put = store->Put(TestState(path).source()).status();
    if (!put.ok() && !absl::IsAborted(put)) {
      fprintf(stderr, "%s\n", put.ToString().c_str());
      return 1;
    }
  }
  return read > 20 ? 0 : 4;
}

TEST(DiskStoreSharedTest, ProcessesShareAFolder) {
  InitLog("test", LogLevel::kError);
  TestFolder folder;
  std::vector<pid_t> children;
  for (uint64_t i = 0; i < 4; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(Traffic(folder.path, 100 + i));
    children.push_back(child);
  }
  size_t ended = 0;
  std::vector<int> codes(children.size(), -1);
  while (ended < children.size()) {
    int64_t bytes = 0;
    std::error_code gone;
    // Seen without the lock, so a file that takes a name is counted at most twice.
    for (const auto& entry : fs::directory_iterator(folder.path)) {
      const auto size = entry.file_size(gone);
      if (!gone) bytes += static_cast<int64_t>(size);
    }
    EXPECT_LE(bytes, kBound + 8000);
    for (size_t i = 0; i < children.size(); ++i) {
      int status = 0;
      if (codes[i] < 0 && waitpid(children[i], &status, WNOHANG) == children[i]) {
        codes[i] = WIFEXITED(status) ? WEXITSTATUS(status) : 99;
        ++ended;
      }
    }
    usleep(2000);
  }
  EXPECT_EQ(codes, std::vector<int>(4, 0));
  SystemClock clock;
  auto store = OpenStore(folder.path, &clock);
  store->Scan();
  EXPECT_LE(store->stats().bytes, kBound);
  EXPECT_GT(store->stats().states, 3);
  for (const uint64_t refused : store->stats().refused) EXPECT_EQ(refused, 0u);
}

// Nobody waits for ever for a process that hangs with the folder's lock; reading needs none.
TEST(DiskStoreSharedTest, ALockThatIsNotGivenBackIsNotWaitedFor) {
  InitLog("test", LogLevel::kError);
  TestFolder folder;
  SystemClock clock;
  auto store = OpenStore(folder.path, &clock, absl::Milliseconds(50));
  ASSERT_TRUE(store->PutRecord("s", "one").ok());
  const int held = open((folder.path + "/lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(held, LOCK_EX | LOCK_NB), 0);
  const absl::Status put = store->PutRecord("s", "two");
  EXPECT_EQ(put.ToString(), "UNAVAILABLE: lock " + folder.path +
                                "/lock: another process has held it for 50ms; end it if it hangs");
  EXPECT_EQ(*store->GetRecord("s"), "one");
  close(held);
  EXPECT_TRUE(store->PutRecord("s", "two").ok());
}

// Killed at any moment, a writer leaves whole files and such as are swept.
TEST(DiskStoreSharedTest, AWriterThatIsKilledLeavesNothingHalf) {
  InitLog("test", LogLevel::kError);
  TestFolder folder;
  for (int round = 0; round < 15; ++round) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      SystemClock clock;
      auto store = OpenStore(folder.path, &clock);
      for (uint64_t i = 0;; ++i)
        (void)store->Put(TestState(TestPath(1000 * round + i, 6)).source());
    }
    usleep(static_cast<useconds_t>(3000 + 700 * round));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    SystemClock clock;
    auto store = OpenStore(folder.path, &clock);
    store->Scan();
    for (const uint64_t refused : store->stats().refused) EXPECT_EQ(refused, 0u);
    for (const auto& entry : fs::directory_iterator(folder.path)) {
      EXPECT_FALSE(StoreFolder::IsTemporary(entry.path().filename()));
    }
  }
}

}  // namespace
}  // namespace deltamesh
