// What finds room in a bucket, and what goes for it.
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/store/object_states.h"
#include "tests/unit/store/memory_objects.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh {
namespace {

using testing::MemoryBucket;
using testing::MemoryObjects;
using testing::SteppedClock;
using testing::TestPath;
using testing::TestState;
using testing::TinyIdentity;

class ObjectStatesRoomTest : public ::testing::Test {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  // States and records have a connection each, as in a worker.
  std::unique_ptr<ObjectStates> Open(int64_t bytes_max) {
    ObjectStatesOptions options;
    options.bytes_max = bytes_max;
    options.identity = TinyIdentity();
    auto store = std::make_unique<ObjectStates>(options, std::make_unique<MemoryObjects>(&bucket_),
                                                &clock_, std::make_unique<MemoryObjects>(&bucket_));
    CHECK_OK(store->List());
    return store;
  }

  MemoryBucket bucket_;
  SteppedClock clock_;
};

// In a full bucket, and in one whose bound was lowered, and at no state's cost.
TEST_F(ObjectStatesRoomTest, ARecordThatReplacesOneAsLargeAlwaysFits) {
  const TestState state(TestPath(1, 2));
  const std::string content(900, 'x');
  auto store = Open(int64_t{1} << 20);
  ASSERT_TRUE(store->Put(state.source(), nullptr).ok());
  ASSERT_TRUE(store->PutRecord("a", content).ok());
  const int64_t bytes = store->stats().bytes;
  store = Open(bytes);
  EXPECT_TRUE(store->PutRecord("a", content).ok());
  EXPECT_TRUE(store->PutRecord("a", content.substr(1)).ok());
  EXPECT_TRUE(store->PutRecord("a", content).ok());
  EXPECT_EQ(store->stats().evicted, 0u);
  EXPECT_EQ(store->stats().bytes, bytes);
  store = Open(100);
  EXPECT_TRUE(store->PutRecord("a", content).ok());
  EXPECT_EQ(store->stats().evicted, 1u);
  EXPECT_EQ(store->PutRecord("a", content + "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store->PutRecord("b", "x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*store->GetRecord("a"), content);
}

TEST_F(ObjectStatesRoomTest, NothingGoesForAStateThatTheServerDoesNotTake) {
  auto store = Open(int64_t{1} << 20);
  ASSERT_TRUE(store->Put(TestState(TestPath(1, 2)).source(), nullptr).ok());
  const int64_t bytes = store->stats().bytes;
  store = Open(2 * bytes);
  bucket_.object_bytes_max = bytes;
  const auto larger = store->Put(TestState(TestPath(2, 3)).source(), nullptr);
  EXPECT_EQ(larger.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store->stats().evicted, 0u);
  EXPECT_EQ(store->stats().write_failures, 1u);
  EXPECT_EQ(bucket_.objects.size(), 1u);
}

// What one thread is putting is not there yet, and its room is nobody else's.
TEST_F(ObjectStatesRoomTest, TwoThatArePutAtOnceDoNotTakeTheSameRoom) {
  auto store = Open(int64_t{1} << 20);
  const TestState state(TestPath(1, 2));
  ASSERT_TRUE(store->Put(state.source(), nullptr).ok());
  const int64_t bytes = store->stats().bytes;
  bucket_.objects.clear();
  store = Open(bytes + 100);
  absl::Status put;
  bucket_.before_put_if = [&] { put = store->Put(state.source(), nullptr).status(); };
  EXPECT_TRUE(store->PutRecord("a", std::string(200, 'x')).ok());
  EXPECT_EQ(put.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(bucket_.objects.size(), 1u);
  bucket_.objects.clear();
  store = Open(bytes + 100);
  bucket_.before_put = [&] { put = store->PutRecord("a", std::string(200, 'x')); };
  EXPECT_TRUE(store->Put(state.source(), nullptr).ok());
  EXPECT_EQ(put.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(bucket_.objects.size(), 1u);
  // Room that was not used is given back.
  bucket_.objects.clear();
  store = Open(bytes + 100);
  bucket_.before_put_if = [&] { bucket_.down = true; };
  EXPECT_FALSE(store->PutRecord("a", std::string(200, 'x')).ok());
  bucket_.refuses = "states/";
  EXPECT_FALSE(store->Put(state.source(), nullptr).ok());
  bucket_.down = false;
  EXPECT_TRUE(store->Put(state.source(), nullptr).ok());
}

TEST_F(ObjectStatesRoomTest, NoRecordTakesTheParentOfWhatIsBeingPut) {
  auto store = Open(int64_t{1} << 20);
  const std::vector<PrefixKey> path = TestPath(1, 4);
  ASSERT_TRUE(store->Put(TestState({path.begin(), path.begin() + 2}).source(), nullptr).ok());
  ASSERT_TRUE(store->Put(TestState(path).source(), nullptr).ok());
  const int64_t both = store->stats().bytes;
  std::erase_if(bucket_.objects, [&](const auto& object) {
    return object.first.starts_with("states/" + path.back().Hex());
  });
  ASSERT_EQ(bucket_.objects.size(), 1u);
  store = Open(both + 100);
  absl::Status put;
  bucket_.before_put = [&] { put = store->PutRecord("a", std::string(200, 'x')); };
  ASSERT_TRUE(store->Put(TestState(path).source(), nullptr).ok());
  EXPECT_EQ(put.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store->Find(path).snapshot.value(), 4);
}

// As consoles make folders: they are no conversations, and count for none.
TEST_F(ObjectStatesRoomTest, ObjectsThatStandForFoldersAreNoRecords) {
  for (const char* folder : {"records/", "states/"}) bucket_.objects[folder] = "";
  auto store = Open(int64_t{1} << 20);
  EXPECT_EQ(store->stats().records, 0);
  EXPECT_EQ(store->stats().states, 0);
  EXPECT_TRUE(store->PutRecord("a", "x").ok());
  EXPECT_TRUE(store->List().ok());
  EXPECT_EQ(store->stats().records, 1);
}

// A listing tells what was there before it began to arrive.
TEST_F(ObjectStatesRoomTest, WhatIsPutWhileAListingIsMadeIsKnown) {
  auto store = Open(int64_t{1} << 20);
  for (const char* name : {"a", "b"}) {
    bucket_.after_list = [&] {  // of states; then of records
      bucket_.after_list = [&] { CHECK_OK(store->PutRecord(name, "x")); };
    };
    EXPECT_TRUE(store->List().ok());
  }
  EXPECT_EQ(store->stats().records, 2);
  // One that fails leaves nothing behind.
  bucket_.down = true;
  EXPECT_FALSE(store->List().ok());
  bucket_.down = false;
  EXPECT_TRUE(store->List().ok());
  EXPECT_EQ(store->stats().records, 2);
}

}  // namespace
}  // namespace deltamesh
