#include "runtime/cache/pools.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "runtime/base/random.h"

namespace deltamesh {
namespace {

std::shared_ptr<FixedPool> MakePool(int64_t slots, int64_t floats = 10) {
  return *FixedPool::Create("test pool", slots, floats);
}

TEST(FixedPool, AFullPoolIsAStatusThatNamesIt) {
  auto pool = MakePool(2);
  SlotRef a = *pool->Take(), b = *pool->Take();
  const absl::Status full = pool->Take().status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("test pool: all 2 slots"), absl::string_view::npos) << full;
  a = SlotRef();
  EXPECT_TRUE(pool->Take().ok());
}

TEST(FixedPool, SlotsAreAlignedAndApart) {
  auto pool = MakePool(3, 5);
  SlotRef a = *pool->Take(), b = *pool->Take(), c = *pool->Take();
  for (const SlotRef* r : {&a, &b, &c}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(r->data()) % 64, 0u);
    std::fill_n(r->data(), 5, static_cast<float>(r->index()));
  }
  for (const SlotRef* r : {&a, &b, &c}) {
    for (int i = 0; i < 5; ++i) EXPECT_EQ(r->data()[i], static_cast<float>(r->index()));
  }
}

TEST(FixedPool, TheLastReferenceFrees) {
  auto pool = MakePool(1);
  SlotRef a = *pool->Take();
  SlotRef b = a;
  EXPECT_EQ(a.use_count(), 2);
  a = SlotRef();
  EXPECT_EQ(pool->free_slots(), 0);
  SlotRef c = std::move(b);
  EXPECT_FALSE(b);
  EXPECT_EQ(c.use_count(), 1);
  c = c;  // assigning a handle to itself keeps it
  EXPECT_EQ(c.use_count(), 1);
  c = SlotRef();
  EXPECT_EQ(pool->free_slots(), 1);
}

TEST(FixedPool, HandlesOutliveThePool) {
  auto pool = MakePool(1);
  SlotRef a = *pool->Take();
  pool.reset();
  a.data()[0] = 1;
  EXPECT_EQ(a.data()[0], 1);
}

TEST(FixedPool, ImpossibleSizesAreRefused) {
  EXPECT_FALSE(FixedPool::Create("p", -1, 4).ok());
  EXPECT_FALSE(FixedPool::Create("p", int64_t{1} << 40, int64_t{1} << 40).ok());
  EXPECT_TRUE(FixedPool::Create("p", 0, 0).ok());
}

// A twin that counts by hand.
TEST(FixedPool, RandomUseAgreesWithCounting) {
  SeededEntropy entropy(3);
  auto pool = MakePool(5);
  std::vector<SlotRef> held;
  for (int step = 0; step < 5000; ++step) {
    const uint64_t r = entropy.Next();
    if (r % 3 == 0 || held.empty()) {
      auto taken = pool->Take();
      if (taken.ok()) held.push_back(*std::move(taken));
    } else if (r % 3 == 1) {
      held.push_back(held[(r >> 8) % held.size()]);
    } else {
      held.erase(held.begin() + static_cast<long>((r >> 8) % held.size()));
    }
    std::vector<int> counts(5);
    for (const SlotRef& h : held) ++counts[static_cast<size_t>(h.index())];
    ASSERT_EQ(pool->free_slots(), std::count(counts.begin(), counts.end(), 0));
    for (const SlotRef& h : held) ASSERT_EQ(h.use_count(), counts[static_cast<size_t>(h.index())]);
  }
}

TEST(FixedPool, HandlesMayBeDroppedOnAnotherThread) {
  auto pool = MakePool(4);
  for (int round = 0; round < 200; ++round) {
    SlotRef a = *pool->Take();
    std::thread other([b = a] {});
    a = SlotRef();
    other.join();
  }
  EXPECT_EQ(pool->free_slots(), 4);
}

}  // namespace
}  // namespace deltamesh
