// Records of sessions beside states: whose work waits for whose, what nobody waits for, and what was lost
// with a damaged file.
#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "deltamesh/mesh/session.pb.h"
#include "runtime/base/log.h"
#include "tests/unit/store/memory_objects.h"
#include "tests/unit/store/tier_fixture.h"

namespace deltamesh {
namespace {

using testing::MemoryBucket;
using testing::MemoryObjects;
using testing::ReadFile;
using testing::TestFolder;
using testing::TieredEngine;
using testing::WriteFile;

constexpr char kFamily[] = "kimi_linear_tiny";

std::string Record(uint64_t stamp) {
  mesh::SessionRecord record;
  record.set_suspended_unix_ns(stamp);
  return record.SerializeAsString();
}

uint64_t StampOf(const SessionStoreDone& done) {
  mesh::SessionRecord record;
  EXPECT_TRUE(record.ParseFromString(done.content));
  return record.suspended_unix_ns();
}

// A server that answers when the test says so, and then badly.
class HangingObjects final : public ObjectStore {
 public:
  explicit HangingObjects(absl::Notification* answers) : answers_(answers) {}
  int64_t object_bytes_max() const override { return 1 << 20; }
  absl::Status Put(const std::string&, ByteReader&, const CancelCheck&) override { return Hang(); }
  absl::Status PutIf(const std::string&, ByteReader&, const std::string&,
                     const CancelCheck&) override {
    return Hang();
  }
  absl::StatusOr<std::string> Get(const std::string&, int64_t, const CancelCheck&, std::string*,
                                  std::string_view) override {
    return Hang();
  }
  absl::StatusOr<std::unique_ptr<ByteReader>> Open(const std::string&, int64_t,
                                                   const CancelCheck&) override {
    return Hang();
  }
  absl::StatusOr<std::vector<ObjectInfo>> List(const std::string&, int64_t,
                                               const CancelCheck&) override {
    return Hang();
  }
  absl::Status Remove(const std::string&) override { return Hang(); }

 private:
  absl::Status Hang() {
    answers_->WaitForNotification();
    return Unavailable("answer 503");
  }
  absl::Notification* const answers_;
};

class StateTierRecordsTest : public ::testing::Test {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  std::unique_ptr<TieredEngine> Engine(const std::string& folder) {
    return std::make_unique<TieredEngine>(kFamily, folder,
                                          std::make_unique<MemoryObjects>(&bucket_));
  }

  MemoryBucket bucket_;
  TestFolder folder_;
};

TEST_F(StateTierRecordsTest, RecordsOfABucketDoNotWaitForItsListing) {
  absl::Notification answers;
  auto t = Engine("");
  t->tier->PutRecord(1, "s", Record(10));
  ASSERT_EQ(t->Done().tier, "object store");
  auto objects = std::make_unique<ObjectStates>(
      ObjectStatesOptions{
          .bytes_max = 1 << 20,
          .identity = {.model = "model", .layout = t->engine.engine->pools().layout}},
      std::make_unique<HangingObjects>(&answers), &t->clock,
      std::make_unique<MemoryObjects>(&bucket_));
  t->tier = std::make_unique<StateTier>(StateTierOptions(), t->cache.get(), nullptr,
                                        std::move(objects), nullptr);  // with threads
  t->tier->Poll(t->clock.now);                                         // begins to list
  t->tier->GetRecord(2, "s");
  std::vector<SessionStoreDone> done;
  const absl::Time give_up = absl::Now() + absl::Seconds(20);
  while (done.empty() && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(1));
    t->tier->Poll(t->clock.now);
    done = t->tier->TakeDone();
  }
  EXPECT_FALSE(t->tier->idle()) << "it still lists";
  answers.Notify();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(StampOf(done[0]), 10u);
}

TEST_F(StateTierRecordsTest, WhatNobodyWaitsForIsAnsweredUndone) {
  auto t = Engine(folder_.path);
  t->tier->PutRecord(1, "s", Record(10));
  ASSERT_TRUE(t->Done().status.ok());
  const int64_t calls = bucket_.calls;
  t->tier->GetRecord(2, "s");
  t->tier->Abandon(2);
  EXPECT_FALSE(t->Done().status.ok());
  t->tier->PutRecord(3, "s", Record(20));
  t->tier->Abandon(3);
  EXPECT_FALSE(t->Done().status.ok());
  EXPECT_EQ(bucket_.calls, calls);
  t->tier->Load(4, TieredEngine::PathOf(std::vector<TokenId>(200, 1)));
  t->tier->Abandon(4);
  EXPECT_FALSE(t->Done().status.ok());
  t->tier->GetRecord(2, "s");  // others are done as ever, whatever their number
  EXPECT_EQ(StampOf(t->Done()), 10u);
}

// The bucket's copy is as new as what was lost only if that had been sent.
TEST_F(StateTierRecordsTest, AnOlderCopyOfADamagedRecordIsNotTakenForTheNewest) {
  const auto damage = [&] {
    int found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path)) {
      if (entry.path().extension() != ".record") continue;
      std::string bytes = ReadFile(entry.path());
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      WriteFile(entry.path(), bytes);
      ++found;
    }
    return found;
  };
  auto t = Engine(folder_.path);
  t->tier->PutRecord(1, "s", Record(10));
  ASSERT_EQ(t->Done().tier, "object store");
  ASSERT_EQ(damage(), 1);
  t->tier->GetRecord(2, "s");
  SessionStoreDone done = t->Done();
  EXPECT_EQ(StampOf(done), 10u);
  EXPECT_FALSE(done.partial) << "the damaged one was sent";
  bucket_.down = true;
  t->tier->PutRecord(3, "s", Record(20));
  ASSERT_EQ(t->Done().tier, "disk");
  ASSERT_EQ(damage(), 1);
  bucket_.down = false;
  t->tier->GetRecord(4, "s");
  done = t->Done();
  EXPECT_EQ(StampOf(done), 10u);
  EXPECT_TRUE(done.partial) << "what was said last is lost";
  // A new one takes its place.
  t->tier->PutRecord(5, "s", Record(30));
  ASSERT_TRUE(t->Done().status.ok());
  t->tier->GetRecord(6, "s");
  done = t->Done();
  EXPECT_EQ(StampOf(done), 30u);
  EXPECT_FALSE(done.partial);
}

// A listing that is old: what it names may be gone, and memory has the only copy by now.
TEST_F(StateTierRecordsTest, ASuspensionLooksWhetherTheBucketStillHasTheState) {
  const auto prompt = testing::RandomPrompt(5, 200, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  for (const bool disk : {false, true}) {
    bucket_.objects.clear();
    auto t = Engine(disk ? folder_.path : "");
    t->Run(prompt);
    t->tier->Suspend(1, path);
    ASSERT_EQ(t->Done().tier, "object store");
    t->Run(prompt);  // in memory again
    bucket_.objects.clear();
    t->tier->Suspend(2, path);
    const SessionStoreDone done = t->Done();
    EXPECT_EQ(done.tier, "object store");
    EXPECT_EQ(done.blocks, 3);
    EXPECT_GT(bucket_.objects.size(), 0u) << disk;
    t->cache->Clear();
    t->tier->Load(3, path);
    EXPECT_EQ(t->Done().blocks, 3);
    // While nobody knows whether it is there memory keeps it, or the disk does.
    t->Run(prompt);
    bucket_.down = true;
    t->tier->Suspend(4, path);
    EXPECT_EQ(t->Done().status.ok(), disk);
    EXPECT_EQ(t->cache->Find(path).snapshot.value() > 0, !disk);
    bucket_.down = false;
  }
}

// A disk that is smaller than what rests in memory is written once, not for ever.
TEST_F(StateTierRecordsTest, WhatWasPutAndHadToGoIsNotPutAgainBeforeItIsUsed) {
  StateTierOptions options;
  options.write_after = absl::Seconds(2);
  constexpr int64_t kCache = int64_t{64} << 20;
  int64_t one = 0;
  {
    TieredEngine t(kFamily, folder_.path + "/size", nullptr, options);
    t.Run(testing::RandomPrompt(20, 70, testing::kVocab), 1);
    t.Settle(absl::Seconds(5));
    one = static_cast<int64_t>(t.Metric("store_bytes", "disk"));
    ASSERT_GT(one, 0);
  }
  TieredEngine t(kFamily, folder_.path + "/small", nullptr, options, kCache, 2 * one + one / 2);
  const auto prompt = [](uint64_t i) { return testing::RandomPrompt(20 + i, 70, testing::kVocab); };
  for (uint64_t i = 0; i < 5; ++i) t.Run(prompt(i), 1);
  for (int i = 0; i < 30; ++i) t.Settle(absl::Seconds(2));
  EXPECT_EQ(t.Metric("store_operations_total", "write"), 5);
  EXPECT_EQ(t.Metric("store_states", "disk"), 2);
  t.Run(prompt(0), 1);
  for (int i = 0; i < 5; ++i) t.Settle(absl::Seconds(2));
  EXPECT_LE(t.Metric("store_operations_total", "write"), 6);
}

}  // namespace
}  // namespace deltamesh
