// A flat table from 64-bit keys to small facts, for millions of them: open addressing, no tombstones, memory
// that follows what is in it.
//
// 64 segments grow and shrink one by one, so an insertion waits at most for a sixty-fourth of the table to be
// copied. Large segments ask for huge pages: with small ones most of an access is address translation.
//
// `Facts` is trivially copyable, all zero when new, and has `bool empty() const`: an entry whose facts are
// empty is not in the table.
//
// Not thread-safe.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

template <typename Facts>
class KeyTable {
  static_assert(std::is_trivially_copyable_v<Facts>);

 public:
  struct Entry {
    uint64_t key;
    Facts facts;
  };

  // Fetches what Find or FindOrAdd of the key will look at first. Inlined by force: GCC takes a function that
  // only prefetches for one without effects and drops calls of it.
  [[gnu::always_inline]] void Prefetch(uint64_t key) const {
    const uint64_t hash = Spread(key);
    const Segment& s = SegmentOf(hash);
    if (s.slots == 0) return;
    const Entry* home = &s.entries[s.Home(hash)];
    __builtin_prefetch(home);
    __builtin_prefetch(home + kGroup);  // where one in five goes on
  }

  const Entry* Find(uint64_t key) const {
    const uint64_t hash = Spread(key);
    const Segment& s = SegmentOf(hash);
    if (s.slots == 0) return nullptr;
    for (size_t i = s.Home(hash);; i = s.Next(i)) {
      const Entry& e = s.entries[i];
      if (e.facts.empty()) return nullptr;
      if (e.key == key) return &e;
    }
  }
  Entry* Find(uint64_t key) { return const_cast<Entry*>(std::as_const(*this).Find(key)); }

  // The entry of `key`, with empty facts when it is new; then the caller fills them or calls Erase.
  Entry* FindOrAdd(uint64_t key) {
    const uint64_t hash = Spread(key);
    Segment& s = SegmentOf(hash);
    if ((s.used + 1) * 8 > s.slots * 5) Resize(s, std::max(kFirstSlots, s.slots * 2));
    for (size_t i = s.Home(hash);; i = s.Next(i)) {
      Entry& e = s.entries[i];
      if (!e.facts.empty() && e.key != key) continue;
      if (e.facts.empty()) {
        e.key = key;
        ++s.used;
        ++size_;
      }
      return &e;
    }
  }

  // An entry whose facts are empty now. Later entries move back, so that nothing is left in its place.
  void Erase(Entry* entry) {
    Segment& s = SegmentOf(Spread(entry->key));
    size_t hole = static_cast<size_t>(entry - s.entries.get());
    for (size_t i = s.Next(hole); !s.entries[i].facts.empty(); i = s.Next(i)) {
      const size_t home = s.Home(Spread(s.entries[i].key));
      if (s.Distance(home, i) < s.Distance(hole, i)) continue;  // it may not stand before its home
      s.entries[hole] = s.entries[i];
      hole = i;
    }
    s.entries[hole] = {};
    --s.used;
    --size_;
    if (s.slots > kFirstSlots && s.used * 6 < s.slots) Resize(s, s.slots / 2);
  }

  // Changes the facts of all entries of one segment; what became empty is gone.
  template <typename Change>
  void ChangeSegment(size_t segment, Change change) {
    Segment& s = segments_[segment];
    const Segment old = std::exchange(s, {});
    size_ -= old.used;
    for (size_t i = 0; i < old.slots; ++i) {
      Entry e = old.entries[i];
      if (e.facts.empty()) continue;
      change(e.facts);
      if (!e.facts.empty()) FindOrAdd(e.key)->facts = e.facts;
    }
  }

  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const Segment& s : segments_) {
      for (size_t i = 0; i < s.slots; ++i) {
        if (!s.entries[i].facts.empty()) visit(s.entries[i]);
      }
    }
  }

  static constexpr size_t kSegments = 64;
  int64_t size() const { return static_cast<int64_t>(size_); }
  int64_t bytes() const {
    size_t slots = 0;
    for (const Segment& s : segments_) slots += s.slots;
    return static_cast<int64_t>(slots * sizeof(Entry) + sizeof(*this));
  }

 private:
  static constexpr size_t kGroup = 4;
  static constexpr size_t kFirstSlots = 16;
  static constexpr size_t kHugePage = size_t{2} << 20;

  struct Free {
    void operator()(Entry* entries) const { std::free(entries); }
  };
  struct Segment {
    std::unique_ptr<Entry[], Free> entries;
    size_t slots = 0;  // a power of two, or none
    size_t used = 0;

    // Of a group of four: for the smallest entries a cache line.
    size_t Home(uint64_t hash) const { return (hash >> 6) & (slots - 1) & ~(kGroup - 1); }
    size_t Next(size_t i) const { return (i + 1) & (slots - 1); }
    size_t Distance(size_t from, size_t to) const { return (to - from) & (slots - 1); }
  };

  // Keys are parts of a cryptographic hash, but a peer may say anything: mixed once more (MurmurHash3's
  // finaliser), so that simple runs of keys do not meet in one place.
  static uint64_t Spread(uint64_t key) {
    key ^= key >> 33;
    key *= 0xff51afd7ed558ccdu;
    key ^= key >> 33;
    key *= 0xc4ceb9fe1a85ec53u;
    return key ^ key >> 33;
  }

  Segment& SegmentOf(uint64_t hash) { return segments_[hash % kSegments]; }
  const Segment& SegmentOf(uint64_t hash) const { return segments_[hash % kSegments]; }

  static Segment MakeSegment(size_t slots) {
    size_t bytes = slots * sizeof(Entry);
    const bool huge = bytes >= kHugePage;
    const size_t unit = huge ? kHugePage : 64;
    bytes = (bytes + unit - 1) / unit * unit;
    void* memory = std::aligned_alloc(unit, bytes);
    CHECK(memory != nullptr, "no memory for %d bytes of an index", bytes);
    if (huge) madvise(memory, bytes, MADV_HUGEPAGE);  // a wish; works without
    std::memset(memory, 0, bytes);
    Segment s;
    s.entries.reset(static_cast<Entry*>(memory));
    s.slots = slots;
    return s;
  }

  static void Resize(Segment& s, size_t slots) {
    Segment larger = MakeSegment(slots);
    for (size_t from = 0; from < s.slots; ++from) {
      const Entry& e = s.entries[from];
      if (e.facts.empty()) continue;
      size_t i = larger.Home(Spread(e.key));
      while (!larger.entries[i].facts.empty()) i = larger.Next(i);
      larger.entries[i] = e;
    }
    larger.used = s.used;
    s = std::move(larger);
  }

  std::array<Segment, kSegments> segments_;
  size_t size_ = 0;
};

}  // namespace deltamesh
