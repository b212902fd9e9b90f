// What goes into a store and comes out of it, whatever the tier.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/prefix/match_blocks.h"
#include "runtime/prefix/prefix_key.h"
#include "runtime/prefix/prefix_tree.h"
#include "runtime/store/refusal.h"

namespace deltamesh {

// A snapshot in memory, about to be written. Everything pointed to stays and does not change until the call
// returns.
struct StateSource {
  std::span<const PrefixKey> path;  // of its blocks, all of them
  SnapshotKind kind{};
  std::span<const std::byte> slab;                  // StateLayout::snapshot_bytes()
  std::vector<std::span<const std::byte>> latents;  // [path.size()], block_bytes() each
};

// Memory for a snapshot that is about to be read. Undefined after a failure.
struct StateTarget {
  std::span<const PrefixKey> path;  // of its blocks, all of them
  std::span<std::byte> slab;
  std::vector<std::span<std::byte>>
      latents;  // [path.size()]; empty: that block is in memory already
};

// What a store has of a prompt, in blocks from its beginning.
struct StoreMatch {
  SnapshotBlocks snapshot;  // where the deepest one stands that can be read; 0: none
  int64_t files = 0;        // to read for it
  SnapshotKind kind{};
};

struct PutResult {
  bool written = false;  // false: it was there already
  int64_t bytes = 0;     // of the file that was written
  int64_t blocks = 0;    // whose latents are in that file
};

// Of one tier since its start.
struct StoreStats {
  uint64_t writes = 0, written_bytes = 0;  // states
  uint64_t write_failures = 0;             // no room, no space, no answer
  uint64_t reads = 0, read_bytes = 0;      // states read whole
  uint64_t read_failures = 0;              // neither missing nor refused
  uint64_t missed = 0;                     // gone when they were to be read
  std::array<uint64_t, kStoreRefusals> refused{};
  uint64_t evicted = 0, evicted_bytes = 0;  // states and records that made room
  uint64_t record_writes = 0, record_reads = 0;
  uint64_t records_refused = 0;  // write failures for want of room: no record makes any
  // As it is now, for all that this process knows.
  int64_t states = 0, bytes = 0;  // bytes: of everything that counts against the bound
  int64_t records = 0;
};

// That a store may hold, whatever is asked for: every process that shares it knows all of their names.
inline constexpr int64_t kStoreRecordsMax = 1'000'000;
inline constexpr int64_t kStoreRecordsDefault = int64_t{1} << 16;
inline constexpr int64_t kRecordBytesMax = int64_t{64} << 20;
inline constexpr int64_t kRecordNameMax = 80;  // bytes, at least 1

}  // namespace deltamesh
