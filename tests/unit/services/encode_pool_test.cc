// Whose large inputs wait for whose.
#include "services/router/encode_pool.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "tests/unit/services/busy_thread.h"

namespace deltamesh {
namespace {

// Counting tokens is free for its client: it must not keep prompts out, nor hold every thread.
TEST(EncodePoolTest, WhatIsAsideLeavesPlacesAndAThread) {
  EncodePool pool({.threads = 2, .queue_max = 2, .aside_max = 2});
  absl::Notification begun, release, answered;
  ASSERT_TRUE(pool.PostAside([&] {
                    begun.Notify();
                    release.WaitForNotification();
                  })
                  .ok());
  begun.WaitForNotification();
  EXPECT_TRUE(pool.PostAside([] {}).ok());
  EXPECT_TRUE(pool.PostAside([] {}).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(pool.PostAside([] {})));
  EXPECT_TRUE(pool.Post([&] { answered.Notify(); }).ok());
  EXPECT_TRUE(answered.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_EQ(pool.queued(), 2) << "the other thread takes no second one";
  release.Notify();
}

// One thread: what waits aside lets everything else go first, and is done in the end.
TEST(EncodePoolTest, WhatIsAsideGoesLast) {
  std::string order;
  {
    EncodePool pool({.threads = 1, .queue_max = 2, .aside_max = 2});
    BusyThread busy(&pool);
    EXPECT_TRUE(pool.PostAside([&] { order += 'a'; }).ok());
    EXPECT_TRUE(pool.Post([&] { order += 'p'; }).ok());
    EXPECT_TRUE(pool.Post([&] { order += 'q'; }).ok());
    EXPECT_TRUE(absl::IsResourceExhausted(pool.Post([] {})));
    busy.Release();
  }
  EXPECT_EQ(order, "pqa");
}

// Prompts that keep coming do not keep it waiting for ever.
TEST(EncodePoolTest, WhatIsAsideHasItsTurnAmongOthers) {
  constexpr int kOthers = EncodePool::kPassedOverMax + 3;
  std::string order;
  {
    EncodePool pool({.threads = 1, .queue_max = kOthers, .aside_max = 2});
    BusyThread busy(&pool);
    EXPECT_TRUE(pool.PostAside([&] { order += 'a'; }).ok());
    EXPECT_TRUE(pool.PostAside([&] { order += 'b'; }).ok());
    for (int i = 0; i < kOthers; ++i) EXPECT_TRUE(pool.Post([&] { order += 'p'; }).ok());
    busy.Release();
  }
  EXPECT_EQ(order, std::string(EncodePool::kPassedOverMax, 'p') + "apppb");
}

}  // namespace
}  // namespace deltamesh
