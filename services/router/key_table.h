// A flat table from 64-bit keys to small facts, for millions of them: open addressing, no tombstones, memory
// that follows what is in it.
//
// 64 segments grow and shrink one by one, so an insertion waits at most for a sixty-fourth of the table to be
// copied. They grow by little, so that a segment of more than a few hundred entries is always more than half
// full: that costs little, as entries stand nearly in the order of their hashes, and a copy reads and writes
// from front to back. Large segments ask for huge pages: with small ones most of an access is address
// translation.
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
    if ((s.used + 1) * 25 > s.slots * 16)
      Resize(s, s.slots + std::max(kFirstSlots, s.slots * 3 / 20));
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
    if (s.used == 0) {
      if (s.slots > kFirstSlots) s = {};
      return;
    }
    // Far enough from where it grows again, and where it would shrink once more.
    const size_t enough = s.used * 5 / 3;
    if (s.used * 25 < s.slots * 13 && s.slots - enough >= kLeastShrink) Resize(s, enough);
  }

  // Changes the facts of all entries of one segment; what became empty is gone.
  template <typename Change>
  void ChangeSegment(size_t segment, Change change) {
    Segment& s = segments_[segment];
    size_t left = 0;
    for (size_t i = 0; i < s.slots; ++i) {
      if (s.entries[i].facts.empty()) continue;
      change(s.entries[i].facts);
      left += !s.entries[i].facts.empty();
    }
    if (left == s.used) return;
    size_ -= s.used - left;
    s.used = left;
    if (left == 0) {
      s = {};
    } else {
      Resize(s, std::max(kFirstSlots, left * 5 / 3));
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
  static constexpr size_t kLeastShrink = 64;  // slots
  static constexpr size_t kPage = 4096;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kLeastMapped = size_t{256}
                                         << 10;  // bytes of a segment with pages of its own

  struct Free {
    size_t mapped = 0;  // bytes; 0: from the heap
    void operator()(Entry* entries) const {
      if (mapped > 0) {
        munmap(entries, mapped);
      } else {
        std::free(entries);
      }
    }
  };
  struct Segment {
    std::unique_ptr<Entry[], Free> entries;
    size_t slots = 0;  // a multiple of kGroup
    size_t used = 0;

    // Of a group of four: for the smallest entries a cache line.
    size_t Home(uint64_t hash) const { return ((hash >> 32) * (slots / kGroup) >> 32) * kGroup; }
    size_t Next(size_t i) const { return i + 1 == slots ? 0 : i + 1; }
    size_t Distance(size_t from, size_t to) const {
      return to >= from ? to - from : to + slots - from;
    }
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

  // All empty, of at least `slots`.
  static Segment MakeSegment(size_t slots) {
    const size_t bytes = slots * sizeof(Entry);
    Segment s;
    if (bytes >= kLeastMapped) {
      const size_t mapped = (bytes + kPage - 1) / kPage * kPage;
      s.entries = {static_cast<Entry*>(MapZeros(mapped)), Free{mapped}};
      s.slots = mapped / sizeof(Entry) / kGroup * kGroup;
      return s;
    }
    s.slots = (slots + kGroup - 1) / kGroup * kGroup;
    const size_t lines = (s.slots * sizeof(Entry) + 63) / 64 * 64;
    void* memory = std::aligned_alloc(64, lines);
    CHECK(memory != nullptr, "no memory for %d bytes of an index", lines);
    std::memset(memory, 0, lines);
    s.entries.reset(static_cast<Entry*>(memory));
    return s;
  }

  // Beginning where a huge page may; what lies before and behind is given back.
  static void* MapZeros(size_t bytes) {
    const size_t slack = bytes >= kHugePage ? kHugePage : 0;
    void* memory =
        mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED, "no memory for %d bytes of an index", bytes);
    if (slack == 0) return memory;
    char* const begin = static_cast<char*>(memory);
    const size_t before = -reinterpret_cast<uintptr_t>(begin) % kHugePage;
    if (before > 0) munmap(begin, before);
    if (before < slack) munmap(begin + before + bytes, slack - before);
    madvise(begin + before, bytes, MADV_HUGEPAGE);  // a wish; works without
    return begin + before;
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
