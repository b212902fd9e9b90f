// Sessions over tiers that fail: nothing older is taken for the newest, what is not known is not called
// absent, and nothing is tried for ever.
#include <gtest/gtest.h>

#include <set>

#include "deltamesh/mesh/session.pb.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/worker/prefix_teller.h"
#include "tests/unit/store/memory_objects.h"
#include "tests/unit/store/tier_fixture.h"

namespace deltamesh {
namespace {

using testing::MemoryBucket;
using testing::MemoryObjects;
using testing::RandomPrompt;
using testing::TestFolder;
using testing::TieredEngine;

constexpr char kFamily[] = "kimi_linear_tiny";

class StateTierFaultsTest : public ::testing::Test {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  std::unique_ptr<TieredEngine> Engine(const char* folder) {
    const std::string path = folder == nullptr ? "" : folder_.path + "/" + folder;
    return std::make_unique<TieredEngine>(kFamily, path, std::make_unique<MemoryObjects>(&bucket_));
  }
  static std::string Record(uint64_t stamp) {
    mesh::SessionRecord record;
    record.set_suspended_unix_ns(stamp);
    return record.SerializeAsString();
  }
  static uint64_t StampOf(const SessionStoreDone& done) {
    mesh::SessionRecord record;
    EXPECT_TRUE(record.ParseFromString(done.content));
    return record.suspended_unix_ns();
  }
  static SessionStoreDone Put(TieredEngine& t, uint64_t stamp) {
    t.tier->PutRecord(1, "s", Record(stamp));
    return t.Done();
  }
  static SessionStoreDone Get(TieredEngine& t) {
    t.tier->GetRecord(1, "s");
    return t.Done();
  }

  // One record in the bucket, a newer one on disk, and the bucket down.
  void KeepANewerOneOnDisk(TieredEngine& t) {
    EXPECT_EQ(Put(t, 10).tier, "object store");
    bucket_.down = true;
    bucket_.refuses = "records/";
    EXPECT_EQ(Put(t, 20).tier, "disk");
  }

  // States that are on disk after 2 s and may go to the bucket 20 s later.
  std::unique_ptr<TieredEngine> FiveOnDisk(absl::Duration scan_every = absl::Seconds(10)) {
    StateTierOptions options;
    options.write_after = absl::Seconds(2);
    options.upload_after = absl::Seconds(20);
    options.scan_every = scan_every;
    auto t = std::make_unique<TieredEngine>(kFamily, folder_.path,
                                            std::make_unique<MemoryObjects>(&bucket_), options);
    for (uint64_t i = 0; i < 5; ++i) t->Run(RandomPrompt(20 + i, 70, testing::kVocab), 1);
    t->Settle(absl::Seconds(5));
    EXPECT_EQ(t->Metric("store_states", "disk"), 5);
    return t;
  }

  MemoryBucket bucket_;
  TestFolder folder_;
};

TEST_F(StateTierFaultsTest, AnOlderRecordInTheBucketDoesNotHideANewerOneOnDisk) {
  auto t = Engine("one");
  KeepANewerOneOnDisk(*t);
  bucket_.down = false;
  EXPECT_EQ(StampOf(Get(*t)), 20u);
  // It is sent by itself, so another machine has it too.
  t->Settle(absl::Seconds(11));
  t->Settle(absl::Seconds(2));
  EXPECT_EQ(StampOf(Get(*Engine("other"))), 20u);
  // The other way round.
  auto other = Engine("other");
  EXPECT_EQ(Put(*other, 30).tier, "object store");
  EXPECT_EQ(StampOf(Get(*t)), 30u);
}

// The bucket may have the record of another worker, and does not say.
TEST_F(StateTierFaultsTest, ARecordOfOneTierIsCalledAPartWhileTheOtherIsDown) {
  auto t = Engine("one");
  EXPECT_TRUE(Put(*t, 10).status.ok());
  EXPECT_FALSE(Get(*t).partial);
  EXPECT_TRUE(Put(*Engine("other"), 30).status.ok());
  bucket_.down = true;
  const SessionStoreDone done = Get(*t);
  EXPECT_EQ(StampOf(done), 10u);
  EXPECT_TRUE(done.partial);
  bucket_.down = false;
  EXPECT_EQ(StampOf(Get(*t)), 30u);
  EXPECT_FALSE(Get(*Engine("empty")).partial) << "a disk without it has said so";
}

// As of credentials that ran out: the record is not given up.
TEST_F(StateTierFaultsTest, WhatWasRefusedOnceIsSentWhenThatHasPassed) {
  auto t = Engine("one");
  EXPECT_EQ(Put(*t, 10).tier, "object store");
  bucket_.down = true;
  bucket_.refuses = "records/";
  bucket_.as = absl::FailedPreconditionError("ExpiredToken");
  EXPECT_EQ(Put(*t, 20).tier, "disk");
  t->Settle(absl::Seconds(2));
  EXPECT_GE(t->Metric("store_unwritten_total", "upload"), 1);
  bucket_.down = false;
  t->Settle(absl::Seconds(11));
  t->Settle(absl::Seconds(2));
  EXPECT_EQ(StampOf(Get(*Engine("other"))), 20u);
}

// The process ends before it could send the record: the next one on the machine does.
TEST_F(StateTierFaultsTest, WhatWasNotSentIsSentAfterARestart) {
  {
    auto t = Engine("one");
    KeepANewerOneOnDisk(*t);
  }
  bucket_.down = false;
  EXPECT_EQ(StampOf(Get(*Engine("other"))), 10u);  // the machine with the newer one is away
  {
    auto t = Engine("one");
    t->Settle(absl::Seconds(2));
    t->Settle(absl::Seconds(2));
  }
  EXPECT_EQ(StampOf(Get(*Engine("other"))), 20u);
  // Once: nothing is marked any more.
  bucket_.objects.erase("records/s");
  auto t = Engine("one");
  t->Settle(absl::Seconds(2));
  t->Settle(absl::Seconds(2));
  EXPECT_EQ(bucket_.objects.count("records/s"), 0u);
}

// Two workers put a record at once: whoever comes last looks at what is there by then.
TEST_F(StateTierFaultsTest, ANewerRecordThatComesMeanwhileStays) {
  auto t = Engine(nullptr), other = Engine(nullptr);
  for (const uint64_t before : {uint64_t{0}, uint64_t{10}}) {
    if (before > 0) {
      EXPECT_TRUE(Put(*t, before).status.ok());
    }
    bucket_.before_put_if = [&] { EXPECT_TRUE(Put(*other, before + 9).status.ok()); };
    EXPECT_EQ(Put(*t, before + 5).status.code(), absl::StatusCode::kAborted);
    EXPECT_EQ(StampOf(Get(*t)), before + 9);
    bucket_.before_put_if = [&] { EXPECT_TRUE(Put(*other, before + 10).status.ok()); };
    EXPECT_TRUE(Put(*t, before + 15).status.ok());
    EXPECT_EQ(StampOf(Get(*other)), before + 15);
    bucket_.objects.clear();
  }
}

// Beyond the bounds a record is refused by name, or stays in the tier that has room; never is one lost.
TEST_F(StateTierFaultsTest, BeyondTheBoundsRecordsAreRefusedOrStayOnDisk) {
  const auto make = [&](int64_t on_disk, int64_t in_bucket) {
    return std::make_unique<TieredEngine>(
        kFamily, folder_.path + "/one", std::make_unique<MemoryObjects>(&bucket_),
        StateTierOptions(), int64_t{64} << 20, int64_t{64} << 20, on_disk, in_bucket);
  };
  const auto put = [](TieredEngine& t, const std::string& name, uint64_t stamp) {
    t.tier->PutRecord(1, name, Record(stamp));
    return t.Done();
  };
  auto t = make(3, 2);
  EXPECT_EQ(put(*t, "a", 1).tier, "object store");
  EXPECT_EQ(put(*t, "z", 1).tier, "object store");
  EXPECT_EQ(put(*t, "m", 1).tier, "disk");
  EXPECT_EQ(t->Metric("store_records_refused_total", "object_store"), 1);
  EXPECT_EQ(t->Metric("store_records_refused_total", "disk"), 0);
  const SessionStoreDone refused = put(*t, "n", 1);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(MessageOf(refused.status).find("--store-s3-records"), std::string::npos);
  EXPECT_EQ(t->Metric("store_records_refused_total", "disk"), 1);
  EXPECT_EQ(t->Metric("store_records", "disk"), 3);
  EXPECT_EQ(t->Metric("store_records", "object_store"), 2);
  t->tier->GetRecord(1, "n");
  EXPECT_EQ(t->Done().status.code(), absl::StatusCode::kNotFound);
  // What waits for room in the bucket keeps back none that replace theirs.
  bucket_.down = true;
  EXPECT_EQ(put(*t, "z", 2).tier, "disk");
  bucket_.down = false;
  t->Settle(absl::Seconds(11));
  t->Settle(absl::Seconds(1));
  const auto other = Engine("other");
  other->tier->GetRecord(1, "z");
  EXPECT_EQ(StampOf(other->Done()), 2u);
  other->tier->GetRecord(1, "m");
  EXPECT_EQ(other->Done().status.code(), absl::StatusCode::kNotFound);
  // With room it goes up by itself.
  t = make(3, 3);
  t->Settle(absl::Seconds(1));
  t->Settle(absl::Seconds(1));
  other->tier->GetRecord(1, "m");
  EXPECT_EQ(StampOf(other->Done()), 1u);
}

TEST_F(StateTierFaultsTest, AnOlderRecordReplacesNone) {
  auto t = Engine("one"), other = Engine("other");
  EXPECT_TRUE(Put(*t, 20).status.ok());
  EXPECT_EQ(Put(*t, 10).status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Put(*other, 15).status.code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(Put(*t, 20).status.ok());
  EXPECT_EQ(StampOf(Get(*other)), 20u);
}

TEST_F(StateTierFaultsTest, ABucketThatDoesNotAnswerIsNotAnAbsentSession) {
  auto t = Engine("one");
  auto alone = Engine(nullptr);
  EXPECT_EQ(Get(*t).status.code(), absl::StatusCode::kNotFound);
  bucket_.down = true;
  EXPECT_EQ(Get(*t).status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Get(*alone).status.code(), absl::StatusCode::kUnavailable);
  bucket_.down = false;
  EXPECT_TRUE(Put(*alone, 5).status.ok());
  EXPECT_EQ(StampOf(Get(*t)), 5u);
}

TEST_F(StateTierFaultsTest, ADamagedOrForeignRecordStaysAndIsNamed) {
  auto t = Engine(nullptr);
  EXPECT_TRUE(Put(*t, 5).status.ok());
  std::string& object = bucket_.objects.at("records/s");
  const std::string good = object;
  object.back() ^= 1;
  EXPECT_EQ(Get(*t).status.code(), absl::StatusCode::kDataLoss);
  object = good;
  object[8] = 2;  // the format's version
  EXPECT_EQ(Get(*t).status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Put(*t, 6).status.code(), absl::StatusCode::kFailedPrecondition);
  bucket_.objects["records/s"] = good;
  EXPECT_EQ(StampOf(Get(*t)), 5u);
}

TEST_F(StateTierFaultsTest, AStateThatCannotBeReadEndsAResume) {
  const auto prompt = RandomPrompt(4, 330, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  {
    auto t = Engine("one");
    t->Run(prompt);
    t->tier->Suspend(1, path);
    EXPECT_EQ(t->Done().tier, "object store");
  }
  auto alone = Engine(nullptr);
  bucket_.down = true;
  bucket_.refuses = "states/";
  const int64_t before = bucket_.calls;
  alone->tier->Load(2, path);
  EXPECT_EQ(alone->Done().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(bucket_.calls - before, 10);
  bucket_.down = false;
  alone->tier->Load(3, path);
  SessionStoreDone done = alone->Done();
  EXPECT_TRUE(done.status.ok()) << done.status;
  EXPECT_EQ(done.blocks, 5);
  // A disk that has it too does not need the bucket.
  auto one = Engine("one");
  bucket_.down = true;
  one->tier->Load(4, path);
  done = one->Done();
  EXPECT_EQ(done.blocks, 5);
  EXPECT_EQ(done.tier, "disk");
}

// A session over a bucket alone: down, up on another worker, and on with the bits of a cold run.
TEST_F(StateTierFaultsTest, WithoutAnyDiskASessionMovesToo) {
  const auto prompt = RandomPrompt(6, 330, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  {
    auto t = Engine(nullptr);
    t->Run(prompt);
    t->tier->Suspend(1, path);
    const SessionStoreDone done = t->Done();
    EXPECT_EQ(done.blocks, 5);
    EXPECT_EQ(done.tier, "object store");
    EXPECT_EQ(t->cache->Find(path).snapshot.value(), 0);
    EXPECT_EQ(Put(*t, 7).tier, "object store");
  }
  auto t = Engine(nullptr);
  EXPECT_EQ(StampOf(Get(*t)), 7u);
  t->tier->Load(2, path);
  EXPECT_EQ(t->Done().blocks, 5);
  EXPECT_EQ(t->Run(prompt), t->Cold(prompt));
  EXPECT_EQ(t->restored, 320);
}

// What another prompt goes on from stays in memory when one session is suspended.
TEST_F(StateTierFaultsTest, SuspendingDropsOnlyWhatIsTheSessionsOwn) {
  const auto prompt = RandomPrompt(8, 200, testing::kVocab);
  std::vector<TokenId> other(prompt.begin(), prompt.begin() + 192);
  for (const TokenId token : RandomPrompt(9, 100, testing::kVocab)) other.push_back(token);
  const auto path = TieredEngine::PathOf(prompt);
  auto t = Engine(nullptr);
  t->Run(prompt, 1);
  t->Run(other, 1);
  EXPECT_EQ(t->restored, 192);
  t->tier->Suspend(1, path);
  EXPECT_EQ(t->Done().blocks, 3);
  EXPECT_EQ(t->cache->Find(path).snapshot.value(), 3);
  t->tier->Suspend(2, TieredEngine::PathOf(other));
  EXPECT_EQ(t->Done().blocks, 4);
  EXPECT_EQ(t->cache->tree().stats().snapshots, 0);
}

// Two workers with the same state and no disk: one object.
TEST_F(StateTierFaultsTest, AStateIsPutOnce) {
  const auto prompt = RandomPrompt(7, 330, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  auto one = Engine(nullptr), other = Engine(nullptr);
  one->Run({prompt.begin(), prompt.begin() + 200});
  one->tier->Suspend(1, {path.begin(), path.begin() + 3});
  one->Done();
  for (TieredEngine* t : {one.get(), other.get()}) {
    t->Run(prompt);
    t->tier->Suspend(2, path);
    EXPECT_EQ(t->Done().blocks, 5);
  }
  EXPECT_EQ(bucket_.objects.size(), 2u);
}

// More states rest above than one look at the disk finds: each gets its turn.
TEST_F(StateTierFaultsTest, AllThatRestsIsUploadedInTheEnd) {
  const auto engine = FiveOnDisk();
  TieredEngine& t = *engine;
  for (int i = 0; i < 10; ++i) t.Settle(absl::Seconds(10));
  EXPECT_EQ(t.Metric("store_states", "object_store"), 5);
}

// The least valuable of them, which would go up first, never does.
TEST_F(StateTierFaultsTest, AStateThatCannotBeUploadedKeepsNoOthersBack) {
  const auto engine = FiveOnDisk();
  TieredEngine& t = *engine;
  bucket_.down = true;
  bucket_.refuses =
      "states/" + TieredEngine::PathOf(RandomPrompt(20, 70, testing::kVocab)).back().Hex();
  for (int i = 0; i < 10; ++i) t.Settle(absl::Seconds(10));
  EXPECT_EQ(t.Metric("store_states", "object_store"), 4);
  // It is tried ever less often, and goes up when it can.
  const int64_t before = bucket_.calls;
  for (int i = 0; i < 360; ++i) t.Settle(absl::Seconds(10));
  EXPECT_GE(bucket_.calls - before, 5);
  EXPECT_LE(bucket_.calls - before, 12);
  bucket_.down = false;
  for (int i = 0; i < 61; ++i) t.Settle(absl::Seconds(10));
  EXPECT_EQ(t.Metric("store_states", "object_store"), 5);
}

// Its header was damaged after it was learned.
TEST_F(StateTierFaultsTest, ADamagedStateIsNotUploadedButRemoved) {
  // A scan would find it, too.
  const auto engine = FiveOnDisk(/*scan_every=*/absl::Hours(1));
  TieredEngine& t = *engine;
  t.cache->Clear();  // or it is written anew
  const auto path = TieredEngine::PathOf(RandomPrompt(20, 70, testing::kVocab));
  const std::string file = folder_.path + "/" + path.back().Hex() + ".state";
  std::string bytes = testing::ReadFile(file);
  bytes.at(100) ^= 1;
  testing::WriteFile(file, bytes);
  for (int i = 0; i < 10; ++i) t.Settle(absl::Seconds(10));
  EXPECT_EQ(t.Metric("store_states", "object_store"), 4);
  EXPECT_EQ(t.Metric("store_states", "disk"), 4);
  EXPECT_EQ(t.Metric("store_refused_total", "bad_header"), 1);
  EXPECT_EQ(t.Metric("store_unwritten_total", "upload"), 1);
}

// One worker put a session in parts, another has it as one file: what goes on from its first blocks there
// hangs on the parts.
TEST_F(StateTierFaultsTest, AStateWhoseParentIsThereInPartsIsPutOnce) {
  StateTierOptions options;
  options.upload_after = absl::Seconds(20);
  const auto engine = [&](const char* folder) {
    return std::make_unique<TieredEngine>(kFamily, folder_.path + "/" + folder,
                                          std::make_unique<MemoryObjects>(&bucket_), options);
  };
  const auto prompt = RandomPrompt(3, 650, testing::kVocab);
  std::vector<TokenId> branch(prompt.begin(), prompt.begin() + 200);
  for (const TokenId token : RandomPrompt(4, 130, testing::kVocab)) branch.push_back(token);
  const auto rest = [](TieredEngine& t) {
    t.Settle(absl::Seconds(31));
    for (int i = 0; i < 5; ++i) t.Settle(absl::Seconds(11));
  };
  {
    auto t = engine("one");
    t->Run({prompt.begin(), prompt.begin() + 330});
    t->Settle(absl::Seconds(31));
    t->Run(prompt);
    rest(*t);
  }
  ASSERT_EQ(bucket_.objects.size(), 2u);
  auto t = engine("other");
  t->Run(prompt);
  t->Settle(absl::Seconds(31));
  t->Run(branch);
  rest(*t);
  EXPECT_GT(bucket_.objects.size(), 2u);
  for (const auto& [name, puts] : bucket_.puts) EXPECT_EQ(puts, 1) << name;
  EXPECT_EQ(t->Metric("store_unwritten_total", "upload"), 0);
  auto third = Engine(nullptr);
  EXPECT_EQ(third->Run(branch), third->Cold(branch));
  EXPECT_EQ(third->restored, 320);
  EXPECT_EQ(third->Metric("store_loads_total", "hit"), 1);
}

// The queue is full when something is due: it is tried again, and not thought to be under way for ever.
TEST_F(StateTierFaultsTest, AnUploadThatFoundNoRoomIsTriedAgain) {
  StateTierOptions options;
  options.write_after = absl::Seconds(2);
  options.upload_after = absl::Seconds(5);
  options.queue_bytes_max = -1;  // takes nothing that is not urgent while something is queued
  TieredEngine t(kFamily, folder_.path, std::make_unique<MemoryObjects>(&bucket_), options);
  t.Run(RandomPrompt(20, 70, testing::kVocab), 1);
  t.Settle(absl::Seconds(3));
  ASSERT_EQ(t.Metric("store_states", "disk"), 1);
  t.clock.now += absl::Seconds(10);
  t.tier->PutRecord(1, "s", Record(1));  // disk first,
  t.tier->RunIo();
  t.tier->Poll(t.clock.now);  // then it waits for the bucket, with the upload that is due
  EXPECT_GE(t.Metric("store_unwritten_total", "queue"), 1);
  for (int i = 0; i < 3; ++i) t.Settle(absl::Seconds(10));
  EXPECT_EQ(t.Metric("store_states", "object_store"), 1);
}

// The bucket has a deeper state, but reading it takes longer than computing: then what the disk has is read.
TEST_F(StateTierFaultsTest, WhereTheBucketIsTooSlowTheDiskIsRead) {
  const auto prompt = RandomPrompt(5, 400, testing::kVocab);
  const std::vector<TokenId> begin(prompt.begin(), prompt.begin() + 200);
  const auto path = TieredEngine::PathOf(prompt);
  {
    TieredEngine other(kFamily, "", std::make_unique<MemoryObjects>(&bucket_));
    other.Run(prompt);
    other.Settle(absl::Seconds(31));
  }
  TieredEngine t(kFamily, folder_.path, std::make_unique<MemoryObjects>(&bucket_));
  bucket_.opening = absl::Milliseconds(450);  // rates are of real time
  {
    const StateLoadRef load = t.tier->Load(path, 0, t.clock.now);
    ASSERT_NE(load, nullptr);
    t.Settle();
    EXPECT_TRUE(t.tier->Ended(load, t.clock.now));
    EXPECT_EQ(t.cache->Find(path).snapshot.value(), 6);
  }
  t.cache->Clear();
  t.Run(begin);
  t.Settle(absl::Seconds(31));
  t.cache->Clear();
  {
    const StateLoadRef load = t.tier->Load(TieredEngine::PathOf(begin), 0, t.clock.now);
    ASSERT_NE(load, nullptr);
    t.Settle();
    EXPECT_TRUE(t.tier->Ended(load, t.clock.now));
  }
  t.cache->Clear();
  // 384 tokens in less time than that; 192 still take longer than a file.
  const StateLoadRef load = t.tier->Load(path, 1000, t.clock.now);
  ASSERT_NE(load, nullptr);
  t.Settle();
  EXPECT_TRUE(t.tier->Ended(load, t.clock.now));
  EXPECT_EQ(t.cache->Find(path).snapshot.value(), 3);
}

// A bucket that is down fails at once, which is not quick: routers must not count on it for the outage.
TEST_F(StateTierFaultsTest, ABucketThatIsDownIsNotTakenForAQuickOne) {
  const auto prompt = RandomPrompt(5, 200, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  auto t = Engine(nullptr);
  t->Run(prompt);
  t->Settle(absl::Seconds(31));
  const auto read = [&] {
    t->cache->Clear();
    const StateLoadRef load = t->tier->Load(path, 0, t->clock.now);
    ASSERT_NE(load, nullptr);
    t->Settle();
    EXPECT_TRUE(t->tier->Ended(load, t->clock.now));
  };
  read();
  const double before = t->tier->bytes_per_second(StoreTier::kObjects);
  EXPECT_GT(before, 0);
  bucket_.down = true;
  read();
  EXPECT_LT(t->tier->bytes_per_second(StoreTier::kObjects), before / 100);
}

// Routers are told of a bucket what this worker would read there: what it put, what others put as of the last
// listing, and no more what it found gone.
TEST_F(StateTierFaultsTest, RoutersHearOfTheBucketWhatItsWorkerKnows) {
  const auto prompt = RandomPrompt(5, 200, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  auto t = Engine(nullptr);
  WorkerLinks links{mesh::Register()};
  links.Open(1);
  PrefixTeller teller(t->cache.get(), t->tier.get());
  teller.Begin(1);
  std::set<uint64_t> objects, latents;
  const auto hear = [&] {
    teller.Tell(links);
    for (const SendToRouter& sent : links.Take()) {
      const mesh::PrefixChanges& changes = sent.message.prefixes();
      for (int i = 0; i < changes.keys_size(); ++i) {
        const char what = changes.changes()[static_cast<size_t>(i)];
        const uint64_t key = changes.keys(i);
        if (what == mesh::PrefixChanges::LATENTS_ADDED) EXPECT_TRUE(latents.insert(key).second);
        if (what == mesh::PrefixChanges::LATENTS_DROPPED) EXPECT_EQ(latents.erase(key), 1u);
        if (what == mesh::PrefixChanges::OBJECT_ADDED) EXPECT_TRUE(objects.insert(key).second);
        if (what == mesh::PrefixChanges::OBJECT_DROPPED) EXPECT_EQ(objects.erase(key), 1u);
      }
    }
  };
  {  // another worker's
    auto other = Engine(nullptr);
    other->Run(prompt);
    other->Settle(absl::Seconds(31));
    EXPECT_EQ(other->Metric("store_states", "object_store"), 1);
  }
  hear();
  EXPECT_TRUE(objects.empty()) << "not listed yet";
  t->Settle(absl::Seconds(61));
  hear();
  const std::set<uint64_t> state = {path[2].index()};
  EXPECT_EQ(objects, state);
  EXPECT_TRUE(latents.empty()) << "none are the worker's own";
  // Who comes later is told the same.
  objects.clear();
  teller.Begin(1);
  hear();
  EXPECT_EQ(objects, state);
  // Found gone, and put again from memory.
  const auto kept = std::exchange(bucket_.objects, {});
  const StateLoadRef load = t->tier->Load(path, 0, t->clock.now);
  ASSERT_NE(load, nullptr);
  t->Settle();
  EXPECT_TRUE(t->tier->Ended(load, t->clock.now));
  hear();
  EXPECT_TRUE(objects.empty());
  t->Run(prompt);
  t->Settle(absl::Seconds(31));
  hear();
  EXPECT_EQ(objects, state);
  EXPECT_EQ(bucket_.objects.size(), kept.size());
}

// A bucket that lives and is slow costs one prompt the longest wait, not each.
TEST_F(StateTierFaultsTest, ABucketThatIsLateIsNotWaitedForAgain) {
  const auto prompt = RandomPrompt(5, 200, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  {
    TieredEngine other(kFamily, "", std::make_unique<MemoryObjects>(&bucket_));
    other.Run(prompt);
    other.Settle(absl::Seconds(31));
  }
  auto t = Engine(nullptr);
  StateTierOptions options;
  options.load_max = absl::Milliseconds(500);
  auto objects = std::make_unique<ObjectStates>(
      ObjectStatesOptions{
          .bytes_max = int64_t{64} << 20,
          .identity = {.model = "model", .layout = t->engine.engine->pools().layout}},
      std::make_unique<MemoryObjects>(&bucket_), &t->clock);
  t->tier = std::make_unique<StateTier>(options, t->cache.get(), nullptr, std::move(objects),
                                        nullptr);  // with threads
  const auto wait_until = [&](const std::function<bool()>& done) {
    while (!done()) {
      absl::SleepFor(absl::Milliseconds(1));
      t->tier->Poll(absl::Now());
    }
  };
  t->tier->Poll(absl::Now());
  wait_until([&] { return t->tier->idle(); });
  bucket_.opening = absl::Milliseconds(1200);
  constexpr double kTokensPerSecond = 1000;  // 192 of them, which is less than the longest wait
  StateLoadRef load = t->tier->Load(path, kTokensPerSecond, absl::Now());
  ASSERT_NE(load, nullptr);  // nothing is known of the bucket
  wait_until([&] { return t->tier->Ended(load, absl::Now()); });
  EXPECT_EQ(t->Metric("store_loads_total", "late"), 1);
  load = nullptr;
  // While that read still hangs, and after it.
  EXPECT_EQ(t->tier->Load(path, kTokensPerSecond, absl::Now()), nullptr);
  EXPECT_EQ(t->Metric("store_loads_total", "slower"), 1);
  wait_until([&] { return t->tier->idle(); });
  EXPECT_EQ(t->Metric("store_loads_total", "cancelled") + t->Metric("store_loads_total", "hit"), 0)
      << "it was late, and ended once";
  EXPECT_EQ(t->tier->Load(path, kTokensPerSecond, absl::Now()), nullptr);
  EXPECT_EQ(t->Metric("store_loads_total", "slower"), 2);
  EXPECT_TRUE(t->tier->idle());
}

// What was slow once is tried again, with nobody waiting, and read once it is quicker.
TEST_F(StateTierFaultsTest, ABucketThatWasSlowIsTriedAgain) {
  const auto prompt = RandomPrompt(5, 400, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  constexpr double kTokensPerSecond = 1000;  // 384 of them
  {
    TieredEngine other(kFamily, "", std::make_unique<MemoryObjects>(&bucket_));
    other.Run(prompt);
    other.Settle(absl::Seconds(31));
  }
  auto t = Engine(nullptr);
  bucket_.opening = absl::Milliseconds(450);  // rates are of real time
  {
    const StateLoadRef load = t->tier->Load(path, kTokensPerSecond, t->clock.now);
    ASSERT_NE(load, nullptr);
    t->Settle();
    EXPECT_TRUE(t->tier->Ended(load, t->clock.now));
  }
  t->cache->Clear();
  bucket_.opening = absl::ZeroDuration();
  const auto blocks_after_a_try = [&](absl::Duration passed, absl::Duration until_it_is_read) {
    t->clock.now += passed;
    EXPECT_EQ(t->tier->Load(path, kTokensPerSecond, t->clock.now), nullptr);
    t->clock.now += until_it_is_read;
    t->Settle();
    return t->cache->Find(path).snapshot.value();
  };
  const absl::Duration soon = absl::Milliseconds(1);
  EXPECT_EQ(blocks_after_a_try(absl::Seconds(30), soon), 0);
  EXPECT_EQ(blocks_after_a_try(absl::Seconds(40), absl::Seconds(1)),
            0);  // it is no longer worth it
  EXPECT_EQ(blocks_after_a_try(absl::Seconds(30), soon), 0);
  EXPECT_EQ(blocks_after_a_try(absl::Seconds(40), soon), 6);
  EXPECT_EQ(t->Metric("store_loads_total", "hit"), 1);
  t->cache->Clear();
  EXPECT_NE(t->tier->Load(path, kTokensPerSecond, t->clock.now), nullptr);
}

}  // namespace
}  // namespace deltamesh
