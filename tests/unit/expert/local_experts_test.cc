#include "runtime/expert/local_experts.h"

#include <gtest/gtest.h>

#include "tests/unit/expert/fake_experts.h"

namespace deltamesh {
namespace {

using testing::FakeBatch;
using testing::FakeExperts;

TEST(LocalExperts, AgreesWithDoublePrecisionTwin) {
  const FakeExperts fake(1, 2, 7, 40, 72);
  ThreadPool pool(2);
  LocalExperts experts(&fake.set(), &pool);
  FakeBatch b(2, 1, 13, 3, fake.set());
  const auto ticket = experts.Start(b.batch);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ASSERT_TRUE(experts.Finish(*ticket).ok());
  for (int64_t i = 0; i < 13 * 3; ++i) {
    const auto want = fake.Twin(1, b.ids[i], &b.x[i / 3 * 40]);
    for (int64_t c = 0; c < 40; ++c) {
      // Chains of 40 and 72 float32 steps over values of order 1: far below 1e-4 when right.
      EXPECT_NEAR(b.out[i * 40 + c], want[c], 1e-4) << i << " " << c;
    }
  }
}

TEST(LocalExperts, BitsDoNotDependOnGroupingOrThreads) {
  const FakeExperts fake(3, 3, 9, 33, 65);
  ThreadPool one(1), three(3);
  LocalExperts whole(&fake.set(), &three), single(&fake.set(), &one);
  FakeBatch b(4, 2, 50, 4, fake.set());
  ASSERT_TRUE(whole.Start(b.batch).ok());
  for (int64_t i = 0; i < 50 * 4; ++i) {
    std::vector<float> out(33);
    const ExpertRow row = {static_cast<int32_t>(i / 4), b.ids[i]};
    ASSERT_TRUE(single.Compute(2, {&row, 1}, b.x.data(), out.data()).ok());
    for (int64_t c = 0; c < 33; ++c) ASSERT_EQ(out[c], b.out[i * 33 + c]) << i << " " << c;
  }
}

// More rows than one wave holds, most of them for one expert.
TEST(LocalExperts, ManyRows) {
  const FakeExperts fake(5, 2, 3, 8, 16);
  ThreadPool pool(2);
  LocalExperts experts(&fake.set(), &pool);
  FakeBatch b(6, 1, 1500, 1, fake.set());
  for (int64_t i = 0; i < 1500; ++i) b.ids[i] = i % 10 == 0 ? 2 : (i % 7 == 0 ? 0 : 1);
  ASSERT_TRUE(experts.Start(b.batch).ok());
  for (int64_t i = 0; i < 1500; i += 13) {
    const auto want = fake.Twin(1, b.ids[i], &b.x[i * 8]);
    for (int64_t c = 0; c < 8; ++c) ASSERT_NEAR(b.out[i * 8 + c], want[c], 1e-5) << i;
  }
}

TEST(LocalExperts, ExpertHeldElsewhereIsUnavailable) {
  const FakeExperts fake(7, 2, 4, 8, 8);
  const ExpertSet part = fake.Shard(1, 2);
  ThreadPool pool(1);
  LocalExperts experts(&part, &pool);
  FakeBatch b(8, 1, 2, 2, part);
  b.ids = {1, 3, 1, 2};
  const auto ticket = experts.Start(b.batch);
  EXPECT_EQ(ticket.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(ticket.status().message().find("expert 2 of layer 1"), std::string::npos);
  b.ids = {1, 3, 3, 1};
  EXPECT_TRUE(experts.Start(b.batch).ok());
}

}  // namespace
}  // namespace deltamesh
