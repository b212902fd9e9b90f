#include "runtime/base/thread_pool.h"

#include <gtest/gtest.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace deltamesh {
namespace {

TEST(ThreadPool, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    for (const int64_t n : {0, 1, 2, 7, 64, 1000}) {
      for (const int64_t grain : {1, 3, 2000}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
        pool.ParallelFor(n, grain, [&](int64_t begin, int64_t end) {
          ASSERT_LE(0, begin);
          ASSERT_LT(begin, end);
          ASSERT_LE(end, n);
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
        });
        for (const auto& h : hits) ASSERT_EQ(h.load(), 1) << n << " " << grain << " " << threads;
      }
    }
  }
}

TEST(ThreadPool, ManySmallJobsInARow) {
  ThreadPool pool(2);
  std::atomic<int64_t> sum{0};
  for (int job = 0; job < 5000; ++job) {
    pool.ParallelFor(8, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  }
  EXPECT_EQ(sum.load(), 40000);
}

// Far more threads than cores: most find their job closed, some enter the one after it.
TEST(ThreadPool, ThreadsThatComeLateFindTheJobClosed) {
  for (const absl::Duration spin : {absl::ZeroDuration(), absl::Microseconds(50)}) {
    ThreadPool pool(24, spin);
    for (int job = 0; job < 2000; ++job) {
      const int64_t n = 1 + job % 37;
      std::vector<int> hits(static_cast<size_t>(n));  // not atomic: pieces are disjoint
      pool.ParallelFor(n, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
      });
      for (const int h : hits) ASSERT_EQ(h, 1) << "job " << job;
    }
  }
}

TEST(ThreadPool, SleepersWakeForTheNextJob) {
  ThreadPool pool(2, absl::ZeroDuration());
  std::atomic<bool> both{false};
  std::atomic<int> inside{0};
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (int job = 0; job < 20; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    both = false;
    inside = 0;
    // Each piece waits for the other, so two threads must take part.
    pool.ParallelFor(2, 1, [&](int64_t, int64_t) {
      if (++inside == 2) both = true;
      while (!both && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
    });
    ASSERT_TRUE(both) << "job " << job;
  }
}

// Between jobs threads look for the next one for microseconds, not for as long as there is none.
TEST(ThreadPool, AnIdlePoolSleeps) {
  ThreadPool pool(4);
  pool.ParallelFor(64, 1, [](int64_t, int64_t) {});
  const auto used = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // to be asleep on a busy machine too
  const auto before = used();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(used() - before, std::chrono::milliseconds(10));
}

TEST(ThreadPool, AJobSmallerThanAGrainStaysOnTheCaller) {
  ThreadPool pool(2);
  const auto caller = std::this_thread::get_id();
  pool.ParallelFor(4, 16, [&](int64_t begin, int64_t end) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(end, 4);
  });
}

}  // namespace
}  // namespace deltamesh
