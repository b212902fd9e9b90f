// The table against a map, over keys that a peer may have chosen badly.
#include "services/router/key_table.h"

#include <gtest/gtest.h>

#include <unordered_map>
#include <vector>

#include "runtime/base/random.h"

namespace deltamesh {
namespace {

struct Facts {
  uint64_t bits;
  bool empty() const { return bits == 0; }
};
using Table = KeyTable<Facts>;
using Twin = std::unordered_map<uint64_t, uint64_t>;

void ExpectSame(const Table& table, const Twin& twin, uint64_t seed) {
  ASSERT_EQ(table.size(), static_cast<int64_t>(twin.size())) << "seed " << seed;
  size_t seen = 0;
  table.ForEach([&](const Table::Entry& e) {
    ++seen;
    const auto found = twin.find(e.key);
    ASSERT_NE(found, twin.end()) << e.key;
    EXPECT_EQ(e.facts.bits, found->second);
  });
  EXPECT_EQ(seen, twin.size());
  for (const auto& [key, bits] : twin) {
    const Table::Entry* e = table.Find(key);
    ASSERT_NE(e, nullptr) << "seed " << seed << " key " << key;
    EXPECT_EQ(e->facts.bits, bits);
  }
}

TEST(KeyTableTest, DoesWhatAMapDoes) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SeededEntropy entropy(seed);
    const auto pick = [&](uint64_t n) { return entropy.Next() % n; };
    // Drawn keys, runs, and keys that differ in their high or low bits alone.
    const auto key = [&] {
      const uint64_t n = pick(3000);
      switch (seed % 4) {
        case 0:
          return n;
        case 1:
          return n << 40;
        case 2:
          return n * 64;
        default:
          return n * 0x9e3779b97f4a7c15u;
      }
    };
    Table table;
    Twin twin;
    for (int step = 0; step < 40000; ++step) {
      const uint64_t k = key();
      const bool grows = step % 20000 < 12000;  // fills, then thins out, twice
      if (pick(10) < (grows ? 7u : 2u)) {
        const uint64_t bit = uint64_t{1} << pick(64);
        table.FindOrAdd(k)->facts.bits |= bit;
        twin[k] |= bit;
      } else if (Table::Entry* e = table.Find(k)) {
        ASSERT_TRUE(twin.erase(k));
        e->facts.bits = 0;
        table.Erase(e);
      } else {
        ASSERT_FALSE(twin.contains(k));
      }
      if (step % 5000 == 4999) ExpectSame(table, twin, seed);
      if (step % 7001 == 7000) {  // a worker leaves: one of its bits goes everywhere
        const uint64_t mask = ~(uint64_t{1} << pick(64));
        for (size_t s = 0; s < Table::kSegments; ++s) {
          table.ChangeSegment(s, [mask](Facts& f) { f.bits &= mask; });
        }
        for (auto& [held, bits] : twin) bits &= mask;
        std::erase_if(twin, [](const auto& entry) { return entry.second == 0; });
        ExpectSame(table, twin, seed);
      }
    }
  }
}

TEST(KeyTableTest, MemoryFollowsWhatIsInIt) {
  Table table;
  const int64_t empty = table.bytes();
  constexpr uint64_t kKeys = 100'000;
  for (uint64_t k = 0; k < kKeys; ++k) table.FindOrAdd(k * 7919)->facts.bits = 1;
  const int64_t full = table.bytes();
  EXPECT_LE(full, static_cast<int64_t>(2 * kKeys * sizeof(Table::Entry)));
  // As many go as come, ten times over: no tombstones, no growth.
  for (uint64_t k = 0; k < 10 * kKeys; ++k) {
    Table::Entry* old = table.Find(k * 7919);
    ASSERT_NE(old, nullptr);
    old->facts.bits = 0;
    table.Erase(old);
    table.FindOrAdd((k + kKeys) * 7919)->facts.bits = 1;
  }
  EXPECT_EQ(table.size(), static_cast<int64_t>(kKeys));
  EXPECT_LE(table.bytes(), full * 5 / 4);
  for (uint64_t k = 10 * kKeys; k < 11 * kKeys; ++k) {
    Table::Entry* old = table.Find(k * 7919);
    old->facts.bits = 0;
    table.Erase(old);
  }
  EXPECT_EQ(table.size(), 0);
  EXPECT_LE(table.bytes(),
            empty + static_cast<int64_t>(Table::kSegments * 16 * sizeof(Table::Entry)));
}

struct WideFacts {  // so that segments of many entries take few
  uint64_t bits;
  uint64_t more[14];
  bool empty() const { return bits == 0; }
};

// Grows to `most` entries and shrinks again, by one entry at a time and by what is done to whole segments: at
// least half full at every size above a small one.
template <typename F>
void ExpectHalfFullAtEverySize(uint64_t most) {
  using T = KeyTable<F>;
  constexpr uint64_t kLeast = 20'000;
  constexpr double kEntry = sizeof(typename T::Entry);
  T table;
  int64_t nearly_full = 0, nearly_half = 0;
  const auto expect_full = [&](uint64_t keys, const char* when) {
    ASSERT_EQ(table.size(), static_cast<int64_t>(keys));
    if (keys < kLeast) return;
    const double each = static_cast<double>(table.bytes()) / static_cast<double>(keys);
    EXPECT_LE(each, 2 * kEntry) << keys << " entries, " << when;
    nearly_full += each <= 1.65 * kEntry;
    nearly_half += each >= 1.7 * kEntry;
  };
  uint64_t keys = 0;
  for (uint64_t next = 1000; next < most; next += next / 32) {
    for (; keys < next; ++keys) table.FindOrAdd(keys)->facts.bits = 1 + keys % 2;
    expect_full(keys, "growing");
  }
  EXPECT_GT(nearly_full, 5) << "the sizes walked miss where a segment grows";
  EXPECT_GT(nearly_half, 5) << "the sizes walked miss where a segment has grown";
  bool thinned = false;
  for (uint64_t next = keys; next > 5000; next -= next / 16) {
    for (; keys > next; --keys) {
      auto* e = table.Find(keys - 1);
      ASSERT_NE(e, nullptr);
      e->facts.bits = 0;
      table.Erase(e);
    }
    expect_full(keys, "shrinking");
    if (thinned || next > most / 2) continue;
    thinned = true;
    for (size_t s = 0; s < T::kSegments; ++s) {
      table.ChangeSegment(s, [](F& f) { f.bits &= 1; });
    }
    expect_full((keys + 1) / 2, "half of it gone");
    for (uint64_t k = 1; k < keys; k += 2) table.FindOrAdd(k)->facts.bits = 2;
    expect_full(keys, "and back");
  }
}

TEST(KeyTableTest, AtEverySizeMoreThanHalfFull) { ExpectHalfFullAtEverySize<Facts>(500'000); }

// Segments with pages of their own, and of more than one huge page.
TEST(KeyTableTest, AtEverySizeMoreThanHalfFullInLargeSegments) {
  static_assert(sizeof(KeyTable<WideFacts>::Entry) == 128);
  ExpectHalfFullAtEverySize<WideFacts>(700'000);
}

// A segment of 64 slots would shrink with its last entry, to none.
TEST(KeyTableTest, AnEmptiedSegmentIsGone) {
  for (const uint64_t most : {10u, 35u, 40u, 60u, 200u}) {
    Table table;
    const int64_t none = table.bytes();
    std::vector<uint64_t> keys;  // of one segment: what it takes is that of a segment alone
    for (uint64_t key = 0; keys.size() < most; ++key) {
      Table probe;
      for (const uint64_t k : {keys.empty() ? key : keys[0], key})
        probe.FindOrAdd(k)->facts.bits = 1;
      if (probe.bytes() > none + static_cast<int64_t>(16 * sizeof(Table::Entry))) continue;
      keys.push_back(key);
    }
    for (int again = 0; again < 2; ++again) {
      for (const uint64_t key : keys) table.FindOrAdd(key)->facts.bits = 1;
      EXPECT_EQ(table.size(), static_cast<int64_t>(most));
      for (const uint64_t key : keys) {
        Table::Entry* e = table.Find(key);
        ASSERT_NE(e, nullptr);
        e->facts.bits = 0;
        table.Erase(e);
      }
      EXPECT_EQ(table.size(), 0);
      EXPECT_LE(table.bytes(), none + static_cast<int64_t>(16 * sizeof(Table::Entry)));
      EXPECT_EQ(table.Find(keys[0]), nullptr);
    }
  }
}

TEST(KeyTableTest, AnEmptyTableFindsNothing) {
  Table table;
  table.Prefetch(5);
  EXPECT_EQ(table.Find(5), nullptr);
  EXPECT_EQ(table.size(), 0);
}

}  // namespace
}  // namespace deltamesh
