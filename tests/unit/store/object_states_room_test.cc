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

  std::unique_ptr<ObjectStates> Open(int64_t bytes_max) {
    ObjectStatesOptions options;
    options.bytes_max = bytes_max;
    options.identity = TinyIdentity();
    auto store =
        std::make_unique<ObjectStates>(options, std::make_unique<MemoryObjects>(&bucket_), &clock_);
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

}  // namespace
}  // namespace deltamesh
