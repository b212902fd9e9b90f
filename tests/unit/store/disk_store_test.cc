// One process and its folder: what is found again, what is refused, what makes room.
#include "runtime/store/disk_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "runtime/base/crc32c.h"
#include "runtime/base/log.h"
#include "tests/unit/store/store_fixture.h"

namespace {

// What was flushed, by path: only a lost machine could show that it was not.
std::vector<std::string>* g_flushed = nullptr;

}  // namespace

// In place of the C library's.
extern "C" int fsync(int fd) {
  if (g_flushed != nullptr) {
    g_flushed->push_back(std::filesystem::read_symlink(absl::StrFormat("/proc/self/fd/%d", fd)));
  }
  return static_cast<int>(syscall(SYS_fsync, fd));
}

namespace deltamesh {
namespace {

namespace fs = std::filesystem;
using testing::ReadFile;
using testing::SteppedClock;
using testing::TestFolder;
using testing::TestPath;
using testing::TestState;
using testing::TestTarget;
using testing::TinyIdentity;
using testing::WriteFile;

class DiskStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  std::unique_ptr<DiskStore> OpenStore(int64_t bytes_max = int64_t{1} << 20) {
    DiskStoreOptions options;
    options.folder = folder_.path + "/a/b";
    options.bytes_max = bytes_max;
    options.identity = identity_;
    options.reserve = reserve_;
    options.records_max = 5;
    options.records_bytes_max = 2000;
    auto store = DiskStore::Open(options, &clock_);
    CHECK_OK(store.status());
    while ((*store)->Scan()) {
    }
    return *std::move(store);
  }
  std::string FileOf(const PrefixKey& key) const {
    return folder_.path + "/a/b/" + key.Hex() + ".state";
  }
  int64_t FolderBytes() const {
    int64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder_.path + "/a/b")) {
      bytes += static_cast<int64_t>(entry.file_size());
    }
    return bytes;
  }
  void Put(DiskStore& store, const std::vector<PrefixKey>& path) {
    const auto put = store.Put(TestState(path).source());
    ASSERT_TRUE(put.ok()) << put.status();
    clock_.now += absl::Seconds(1);
  }
  static absl::Status Read(DiskStore& store, const std::vector<PrefixKey>& path, int64_t have = 0) {
    TestTarget target(path, have);
    const auto read = store.Read(target.target(), nullptr);
    if (read.ok()) {
      EXPECT_TRUE(target.Right());
      EXPECT_GT(*read, 0);
    }
    return read.status();
  }
  static std::vector<PrefixKey> First(const std::vector<PrefixKey>& path, int64_t blocks) {
    return {path.begin(), path.begin() + blocks};
  }

  TestFolder folder_;
  SteppedClock clock_;
  StateIdentity identity_ = TinyIdentity();
  ReserveSpace reserve_ = ReserveOnDisk;
};

TEST_F(DiskStoreTest, AFolderThatWasMadeIsNotLostWithAllThatIsInIt) {
  const fs::path made = fs::canonical(folder_.path);
  std::vector<std::string> flushed;
  g_flushed = &flushed;
  const absl::StatusOr<std::unique_ptr<StoreFolder>> folder = StoreFolder::Open(made / "a/b");
  EXPECT_THAT(flushed, ::testing::ElementsAre(made, made / "a"));
  flushed.clear();
  EXPECT_TRUE(StoreFolder::Open(made / "a/b").ok());
  EXPECT_THAT(flushed, ::testing::IsEmpty());
  g_flushed = nullptr;
  ASSERT_TRUE(folder.ok()) << folder.status();
}

TEST_F(DiskStoreTest, StatesAreFoundAgainByAnotherProcess) {
  const auto path = TestPath(1, 9);
  {
    auto store = OpenStore();
    EXPECT_EQ(store->Find(path).snapshot.value(), 0);
    for (const int64_t blocks : {4, 9}) Put(*store, First(path, blocks));
    EXPECT_EQ(store->Find(path).snapshot.value(), 9);
  }
  auto store = OpenStore();
  EXPECT_EQ(store->Find(path).snapshot.value(), 9);
  EXPECT_EQ(store->Find(path).files, 2);
  EXPECT_EQ(store->Find(First(path, 8)).snapshot.value(), 4);
  for (const int64_t have : {0, 1, 4, 5, 9}) EXPECT_TRUE(Read(*store, path, have).ok()) << have;
  EXPECT_TRUE(Read(*store, First(path, 4)).ok());
  EXPECT_EQ(store->stats().reads, 6u);
  EXPECT_EQ(Read(*store, First(path, 5)).code(), absl::StatusCode::kNotFound);
}

// A shared beginning is in the folder once, wherever the paths part.
TEST_F(DiskStoreTest, SharedBlocksAreWrittenOnce) {
  auto store = OpenStore();
  const auto a = TestPath(1, 8, 6), b = TestPath(2, 9, 6);
  EXPECT_EQ(store->Put(TestState(a).source())->blocks, 8);
  EXPECT_EQ(store->Put(TestState(b).source())->blocks, 3);
  EXPECT_EQ(store->Put(TestState(First(a, 5)).source())->blocks, 0);  // only the slab
  EXPECT_FALSE(store->Put(TestState(a).source())->written);
  for (const auto& path : {a, b, First(a, 5)}) EXPECT_TRUE(Read(*store, path).ok());
  auto again = OpenStore();
  for (const auto& path : {a, b, First(a, 5)}) EXPECT_TRUE(Read(*again, path).ok());
  EXPECT_EQ(again->stats().bytes, FolderBytes());
}

// Whichever byte is flipped: refused with a name, counted, gone, and written again.
TEST_F(DiskStoreTest, DamagedFilesAreRefusedAndReplaced) {
  const auto path = TestPath(3, 3);
  auto store = OpenStore();
  Put(*store, path);
  const std::string good = ReadFile(FileOf(path.back()));
  for (size_t at = 0; at < good.size(); at += 7) {
    std::string bad = good;
    bad[at] ^= 0x10;
    WriteFile(FileOf(path.back()), bad);
    const absl::Status read = Read(*store, path);
    ASSERT_TRUE(RefusalOf(read)) << at << read;
    EXPECT_FALSE(fs::exists(FileOf(path.back())));
    EXPECT_EQ(store->Find(path).snapshot.value(), 0);
    Put(*store, path);
  }
  const StoreStats stats = store->stats();
  uint64_t refused = 0;
  for (const uint64_t n : stats.refused) refused += n;
  EXPECT_EQ(refused, (good.size() + 6) / 7);
  EXPECT_TRUE(Read(*store, path).ok());
}

TEST_F(DiskStoreTest, DamageIsFoundAtStartWhenItIsInAHeader) {
  const auto path = TestPath(3, 3);
  Put(*OpenStore(), path);
  std::string bytes = ReadFile(FileOf(path.back()));
  const std::pair<size_t, StoreRefusal> flips[] = {{0, StoreRefusal::kBadMagic},
                                                   {50, StoreRefusal::kBadHeader},
                                                   {170, StoreRefusal::kBadHeader}};
  for (const auto& [at, reason] : flips) {
    std::string bad = bytes;
    bad[at] ^= 1;
    WriteFile(FileOf(path.back()), bad);
    auto store = OpenStore();
    EXPECT_EQ(store->stats().refused[static_cast<size_t>(reason)], 1u) << at;
    EXPECT_EQ(store->Find(path).snapshot.value(), 0);
    EXPECT_FALSE(fs::exists(FileOf(path.back())));
  }
  // Under another file's name.
  WriteFile(FileOf(TestPath(4, 3).back()), bytes);
  auto store = OpenStore();
  EXPECT_EQ(store->stats().refused[static_cast<size_t>(StoreRefusal::kWrongName)], 1u);
  WriteFile(FileOf(path.back()), bytes.substr(0, bytes.size() - 1));
  store->Scan();
  EXPECT_EQ(store->stats().refused[static_cast<size_t>(StoreRefusal::kTruncated)], 1u);
}

// Files of another format or layout are whoever's who reads them: counted, left, and not looked at again.
TEST_F(DiskStoreTest, OtherVersionsAreLeftAlone) {
  const auto path = TestPath(3, 3), other = TestPath(4, 3);
  {
    auto store = OpenStore();
    Put(*store, path);
    Put(*store, other);
  }
  std::string bytes = ReadFile(FileOf(path.back()));
  bytes[8] = 2;  // the format's version
  WriteFile(FileOf(path.back()), bytes);
  bytes = ReadFile(FileOf(other.back()));
  ++bytes[88];  // the layout's version
  uint32_t header;
  std::memcpy(&header, bytes.data() + 12, 4);
  const uint32_t sum = Crc32c(std::as_bytes(std::span(bytes).first(header - 4)));
  std::memcpy(bytes.data() + header - 4, &sum, 4);
  WriteFile(FileOf(other.back()), bytes);
  auto store = OpenStore();
  store->Scan();
  EXPECT_EQ(store->stats().refused[static_cast<size_t>(StoreRefusal::kBadVersion)], 1u);
  EXPECT_EQ(store->stats().refused[static_cast<size_t>(StoreRefusal::kForeignLayout)], 1u);
  for (const auto& p : {path, other}) {
    EXPECT_EQ(store->Find(p).snapshot.value(), 0);
    EXPECT_TRUE(fs::exists(FileOf(p.back())));
  }
  // They count, and make room in their turn.
  auto small = OpenStore(FolderBytes() + 100);
  clock_.now += absl::Hours(1);
  Put(*small, TestPath(20, 3));
  EXPECT_EQ(fs::exists(FileOf(path.back())) + fs::exists(FileOf(other.back())), 1);
}

// A damaged parent makes its children useless until it is written again.
TEST_F(DiskStoreTest, ChildrenWaitForTheirParent) {
  const auto path = TestPath(5, 6);
  auto store = OpenStore();
  Put(*store, First(path, 3));
  Put(*store, path);
  std::string bytes = ReadFile(FileOf(path[2]));
  bytes.back() ^= 1;
  WriteFile(FileOf(path[2]), bytes);
  EXPECT_EQ(*RefusalOf(Read(*store, path)), StoreRefusal::kBadContent);
  EXPECT_EQ(store->Find(path).snapshot.value(), 0);
  Put(*store, First(path, 3));
  EXPECT_EQ(store->Find(path).snapshot.value(), 6);
  EXPECT_TRUE(Read(*store, path).ok());
}

TEST_F(DiskStoreTest, ForeignFilesAreLeftAloneAndAgeOut) {
  const auto mine = TestPath(6, 3), theirs = TestPath(7, 3);
  identity_.model = PrefixModel("another", 1);
  Put(*OpenStore(), theirs);
  const auto file = static_cast<int64_t>(fs::file_size(FileOf(theirs.back())));
  identity_ = TinyIdentity();
  auto store = OpenStore(3 * file);
  EXPECT_EQ(store->stats().refused[static_cast<size_t>(StoreRefusal::kForeignModel)], 1u);
  EXPECT_EQ(store->Find(theirs).snapshot.value(), 0);
  EXPECT_TRUE(fs::exists(FileOf(theirs.back())));
  clock_.now += absl::Hours(1);
  for (uint64_t i = 0; i < 3; ++i) Put(*store, TestPath(20 + i, 3));
  EXPECT_FALSE(fs::exists(FileOf(theirs.back())));
  EXPECT_EQ(store->Find(TestPath(20, 3)).snapshot.value(), 3);
  EXPECT_EQ(store->Find(mine).snapshot.value(), 0);
}

// Random writes and reads beneath a bound of a few files: never above it, never a wrong byte, nothing that
// has children goes before them.
TEST_F(DiskStoreTest, TheBoundHolds) {
  const int64_t bound = 12000;
  auto store = OpenStore(bound);
  SeededEntropy random(5);
  int hits = 0;
  for (int step = 0; step < 400; ++step) {
    const auto path =
        First(TestPath(random.Next() % 6, 8, 3), 1 + static_cast<int64_t>(random.Next() % 8));
    const int64_t found = store->Find(path).snapshot.value();
    if (found > 0) {
      ASSERT_TRUE(Read(*store, First(path, found)).ok());
      ++hits;
    }
    const auto put = store->Put(TestState(path).source());
    ASSERT_TRUE(put.ok()) << put.status();
    ASSERT_EQ(store->Find(path).snapshot.value(), static_cast<int64_t>(path.size()));
    ASSERT_LE(FolderBytes(), bound);
    ASSERT_EQ(store->stats().bytes, FolderBytes());
    clock_.now += absl::Seconds(20);
    if (step % 50 == 0) {
      const auto other = OpenStore(bound);
      EXPECT_EQ(other->Everything().size(), store->Everything().size());
    }
  }
  EXPECT_GT(store->stats().evicted, 50u);
  EXPECT_GT(hits, 50);
  const absl::Status large = store->Put(TestState(TestPath(1, 60)).source()).status();
  EXPECT_EQ(large.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(large.message().find("--store-gib"), std::string::npos);
}

TEST_F(DiskStoreTest, LeftoversOfACrashAreSweptAndThoseOfTheLivingAreNot) {
  auto store = OpenStore();
  const std::string left = folder_.path + "/a/b/.writing-99999-1-1";
  WriteFile(left, std::string(100, 'x'));
  const auto folder = StoreFolder::Open(folder_.path + "/a/b");
  {
    auto living = (*folder)->Create(50, clock_.now);
    ASSERT_TRUE(living.ok());
    OpenStore();
    EXPECT_FALSE(fs::exists(left));
    EXPECT_TRUE(fs::exists(living->path()));
  }
  EXPECT_EQ(FolderBytes(), 0);
}

// Names that agree up to their last '-' are one tenant's, which has a share of what all may have.
TEST_F(DiskStoreTest, ATenantHasAShareOfTheRecords) {
  DiskStoreOptions options;
  options.folder = folder_.path + "/shares";
  options.bytes_max = 1 << 20;
  options.records_max = 8;
  options.records_bytes_max = 4000;
  options.record_group_share = 0.25;
  auto store = *DiskStore::Open(options, &clock_);
  EXPECT_TRUE(store->PutRecord("session-aa-1", "x").ok());
  EXPECT_TRUE(store->PutRecord("session-aa-2", "x").ok());
  const absl::Status full = store->PutRecord("session-aa-3", "x");
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), ::testing::HasSubstr("--store-tenant-share"));
  EXPECT_THAT(std::string(full.message()), ::testing::HasSubstr("session-aa-*.record"));
  EXPECT_EQ(store->stats().records, 2);
  EXPECT_EQ(store->stats().records_refused, 1u);
  // Those that are there may change, within the share of bytes.
  EXPECT_TRUE(store->PutRecord("session-aa-2", std::string(800, 'y')).ok());
  EXPECT_EQ(store->PutRecord("session-aa-1", std::string(300, 'y')).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(store->PutRecord("session-aa-2", "z").ok());
  // Others have theirs, until all of it is used.
  for (const char* tenant : {"bb", "cc", "dd"}) {
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(store->PutRecord(absl::StrFormat("session-%s-%d", tenant, i), "x").ok());
    }
  }
  EXPECT_THAT(std::string(store->PutRecord("session-ee-1", "x").message()),
              ::testing::HasSubstr("--store-records"));
  // What was lowered since keeps no record from following its session.
  options.records_max = 1;
  options.records_bytes_max = 10;
  store = *DiskStore::Open(options, &clock_);
  EXPECT_TRUE(store->PutRecord("session-aa-1", "w").ok());
  EXPECT_EQ(*store->GetRecord("session-aa-1"), "w");
  store->Scan();
  EXPECT_EQ(store->stats().records, 8);
}

// Before a record has its name it is marked, until what it says was sent.
TEST_F(DiskStoreTest, MarksOfUnsentRecordsOutliveTheProcess) {
  auto store = OpenStore();
  EXPECT_TRUE(store->PutRecord("a/b", "one", nullptr, /*unsent=*/true).ok());
  EXPECT_TRUE(store->PutRecord("c", "one").ok());
  store = OpenStore();
  EXPECT_THAT(store->Unsent(10), ::testing::ElementsAre("a/b"));
  EXPECT_EQ(*store->GetRecord("a/b"), "one");
  EXPECT_TRUE(OpenStore()->PutRecord("a/b", "two", nullptr, /*unsent=*/true).ok());
  EXPECT_TRUE(store->MarkSent("a/b", "one").ok());  // another process was quicker
  EXPECT_EQ(store->Unsent(10).size(), 1u);
  EXPECT_TRUE(store->MarkSent("a/b", "two").ok());
  EXPECT_TRUE(store->Unsent(10).empty());
  EXPECT_EQ(*store->GetRecord("a/b"), "two");
}

// A folder that is gone is not a record that is not there: its conversation is not to be begun anew.
TEST_F(DiskStoreTest, AFolderThatIsGoneIsNoAbsentRecord) {
  auto store = OpenStore();
  ASSERT_TRUE(store->PutRecord("s", "content").ok());
  EXPECT_EQ(store->GetRecord("t").status().code(), absl::StatusCode::kNotFound);
  const auto expect_gone = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_NE(MessageOf(status).find("--store-dir"), std::string::npos) << status;
  };
  fs::rename(folder_.path + "/a", folder_.path + "/moved");
  expect_gone(store->GetRecord("s").status());
  expect_gone(store->PutRecord("s", "newer"));
  WriteFile(folder_.path + "/a", "no folder");
  expect_gone(store->GetRecord("s").status());
  fs::remove(folder_.path + "/a");
  fs::rename(folder_.path + "/moved", folder_.path + "/a");
  EXPECT_EQ(*store->GetRecord("s"), "content");
}

// Whoever puts a record forgets the conversation when that is said to be safe.
TEST_F(DiskStoreTest, ARecordWhoseNameIsNotOnTheDiskIsNotSafe) {
  rlimit files;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  bool full = true;
  // The folder is what is opened after the file has its room.
  reserve_ = [&](int fd, int64_t bytes) {
    rlimit none = files;
    none.rlim_cur = full ? 0 : files.rlim_cur;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    return ReserveOnDisk(fd, bytes);
  };
  auto store = OpenStore();
  const absl::Status put = store->PutRecord("s", "content");
  full = false;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_EQ(put.code(), absl::StatusCode::kUnavailable) << put;
  EXPECT_NE(MessageOf(put).find("to the disk"), std::string::npos) << put;
  EXPECT_NE(MessageOf(put).find("ulimit -n"), std::string::npos) << put;
  EXPECT_EQ(store->stats().write_failures, 1u);
  EXPECT_TRUE(store->PutRecord("s", "content").ok());
  EXPECT_EQ(store->stats().records, 1);
}

TEST_F(DiskStoreTest, RecordsAreReplacedAndNeverRemoved) {
  auto store = OpenStore();
  EXPECT_EQ(store->GetRecord("a").status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(store->PutRecord("tenant/a", "one").ok());
  ASSERT_TRUE(store->PutRecord("tenant/a", "two").ok());
  EXPECT_EQ(*OpenStore()->GetRecord("tenant/a"), "two");
  EXPECT_EQ(store->PutRecord("tenant/a", "x", [](std::string_view c) { return c == "two"; }).code(),
            absl::StatusCode::kAborted);
  for (int i = 1; i < 5; ++i) ASSERT_TRUE(store->PutRecord(std::to_string(i), "x").ok());
  // The sixth is one too many; those that are there may change.
  const absl::Status full = store->PutRecord("5", "x");
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("--store-records"), std::string::npos);
  EXPECT_TRUE(store->PutRecord("4", "y").ok());
  EXPECT_EQ(*store->GetRecord("tenant/a"), "two");
  EXPECT_TRUE(store->PutRecord("4", std::string(1500, 'x')).ok());
  EXPECT_EQ(store->PutRecord("3", std::string(1500, 'x')).code(),
            absl::StatusCode::kResourceExhausted);  // bytes
  EXPECT_EQ(store->PutRecord("", "x").code(), absl::StatusCode::kInvalidArgument);

  const std::string file = folder_.path + "/a/b/1.record", good = ReadFile(file);
  std::string bytes = good;
  bytes.back() ^= 1;
  WriteFile(file, bytes);
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(*RefusalOf(store->GetRecord("1").status()), StoreRefusal::kBadContent);
  }
  EXPECT_EQ(ReadFile(file), bytes);
  bytes = good;
  bytes[8] = 2;  // the format's version
  WriteFile(file, bytes);
  EXPECT_EQ(*RefusalOf(store->GetRecord("1").status()), StoreRefusal::kBadVersion);
  EXPECT_EQ(store->PutRecord("1", "new").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReadFile(file), bytes);
  WriteFile(file, good);
  EXPECT_EQ(*store->GetRecord("1"), "x");
}

// In a full folder, and in one whose bound was lowered, and at no state's cost.
TEST_F(DiskStoreTest, ARecordThatReplacesOneAsLargeAlwaysFits) {
  const std::string content(900, 'x');
  auto store = OpenStore();
  Put(*store, TestPath(1, 2));
  ASSERT_TRUE(store->PutRecord("a", content).ok());
  const int64_t bytes = FolderBytes();
  store = OpenStore(bytes);
  EXPECT_TRUE(store->PutRecord("a", content).ok());
  EXPECT_TRUE(store->PutRecord("a", content.substr(1)).ok());
  EXPECT_TRUE(store->PutRecord("a", content).ok());
  EXPECT_EQ(store->stats().evicted, 0u);
  EXPECT_EQ(FolderBytes(), bytes);
  store = OpenStore(100);
  EXPECT_TRUE(store->PutRecord("a", content).ok());
  EXPECT_EQ(store->stats().evicted, 1u);
  EXPECT_EQ(store->PutRecord("a", content + "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store->PutRecord("b", "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*store->GetRecord("a"), content);
}

TEST_F(DiskStoreTest, OnlyItsUserMayReadIt) {
  const mode_t before = umask(0);
  auto store = OpenStore();
  Put(*store, TestPath(1, 2));
  ASSERT_TRUE(store->PutRecord("r", "x").ok());
  umask(before);
  const fs::perms others = fs::perms::group_all | fs::perms::others_all;
  EXPECT_EQ(fs::status(folder_.path + "/a/b").permissions() & others, fs::perms::none);
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder_.path + "/a/b")) {
    EXPECT_EQ(entry.status().permissions() & others, fs::perms::none) << entry.path();
    ++files;
  }
  EXPECT_EQ(files, 3);  // and the lock
}

// Somebody else filled the disk before the bound was reached: old states go, as they would at the bound.
TEST_F(DiskStoreTest, AFullDiskIsMadeRoomOn) {
  int64_t disk_bytes = int64_t{1} << 20;
  reserve_ = [&](int fd, int64_t bytes) {
    return FolderBytes() + bytes > disk_bytes ? ENOSPC : ReserveOnDisk(fd, bytes);
  };
  auto store = OpenStore();
  for (uint64_t i = 0; i < 4; ++i) Put(*store, TestPath(i, 3));
  disk_bytes = FolderBytes();
  Put(*store, TestPath(9, 3));
  EXPECT_EQ(store->Find(TestPath(0, 3)).snapshot.value(), 0);
  EXPECT_EQ(store->Find(TestPath(1, 3)).snapshot.value(), 3);
  EXPECT_TRUE(Read(*store, TestPath(9, 3)).ok());
  EXPECT_EQ(store->stats().bytes, FolderBytes());
  EXPECT_TRUE(store->PutRecord("r", "x").ok());
  disk_bytes = 0;
  EXPECT_EQ(store->PutRecord("s", "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store->stats().records_refused, 1u);
  EXPECT_EQ(store->Everything().size(), 0u);
  EXPECT_EQ(*store->GetRecord("r"), "x");
}

// A file that may not grow stands for a disk that is full: the write ends half way.
TEST_F(DiskStoreTest, AFullDiskIsAnError) {
  auto store = OpenStore();
  Put(*store, TestPath(1, 2));
  struct rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {200, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const absl::Status full = store->Put(TestState(TestPath(2, 3)).source()).status();
  const absl::Status record = store->PutRecord("r", std::string(500, 'x'));
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_EQ(record.code(), absl::StatusCode::kResourceExhausted) << record;
  EXPECT_EQ(store->stats().write_failures, 2u);
  EXPECT_TRUE(Read(*store, TestPath(1, 2)).ok());
  for (const auto& entry : fs::directory_iterator(folder_.path + "/a/b")) {
    EXPECT_FALSE(StoreFolder::IsTemporary(entry.path().filename())) << entry.path();
  }
  Put(*store, TestPath(2, 3));
}

TEST_F(DiskStoreTest, AFolderThatCannotBeWrittenIsReadAndSaysSo) {
  const auto path = TestPath(1, 2), damaged = TestPath(2, 2);
  {
    auto store = OpenStore();
    Put(*store, path);
    Put(*store, damaged);
  }
  std::string bytes = ReadFile(FileOf(damaged.back()));
  bytes.back() ^= 1;
  WriteFile(FileOf(damaged.back()), bytes);
  fs::permissions(folder_.path, fs::perms(0755));
  fs::permissions(folder_.path + "/a", fs::perms(0755));
  for (const auto& entry : fs::directory_iterator(folder_.path + "/a/b")) {
    fs::permissions(entry.path(), fs::perms(0444));  // made for one user, opened to others by hand
  }
  fs::permissions(folder_.path + "/a/b", fs::perms(0555));
  ASSERT_TRUE(geteuid() != 0 || seteuid(65534) == 0);
  {
    auto store = OpenStore();
    EXPECT_TRUE(Read(*store, path).ok());
    const absl::Status put = store->Put(TestState(TestPath(3, 2)).source()).status();
    EXPECT_EQ(put.code(), absl::StatusCode::kFailedPrecondition) << put;
    EXPECT_NE(put.message().find("--store-dir"), std::string::npos);
    EXPECT_FALSE(store->PutRecord("r", "x").ok());
    EXPECT_TRUE(RefusalOf(Read(*store, damaged)));
    store->Scan();
    EXPECT_EQ(store->Find(damaged).snapshot.value(),
              0);  // cannot be removed, and is not tried again
  }
  ASSERT_TRUE(getuid() != 0 || seteuid(0) == 0);
  fs::permissions(folder_.path + "/a/b", fs::perms(0755));
  WriteFile(folder_.path + "/file", "");
  DiskStoreOptions options;
  options.bytes_max = 1;
  options.folder = folder_.path + "/file";
  const absl::Status file = DiskStore::Open(options, &clock_).status();
  EXPECT_EQ(file.code(), absl::StatusCode::kFailedPrecondition);
  options.folder += "/below";
  for (const absl::Status& status : {file, DiskStore::Open(options, &clock_).status()}) {
    EXPECT_THAT(MessageOf(status), ::testing::StartsWith("--store-dir: "));
  }
}

TEST_F(DiskStoreTest, ACancelledReadEnds) {
  auto store = OpenStore();
  Put(*store, TestPath(1, 5));
  TestTarget target(TestPath(1, 5));
  EXPECT_EQ(store->Read(target.target(), [] { return true; }).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_TRUE(Read(*store, TestPath(1, 5)).ok());
}

}  // namespace
}  // namespace deltamesh
