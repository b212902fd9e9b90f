// The format of a stored snapshot: one file per snapshot, which holds the slab at a block boundary and the
// latent blocks that no other file of its path holds yet.
//
// A file stands at block `blocks`. Latents up to block `from` are in the file `parent` (which stands at
// `from` or beyond it, on a path that is the same up to there) and in that one's own parents, up to the
// root. So a prefix shared by a thousand prompts is stored once, and reading one file never needs another's
// slab.
//
// Layout, little-endian, every byte covered by a checksum (CRC-32C):
//     0  "DMSTATE" 0A                     8 bytes
//     8  version                          u32, 1
//    12  header bytes, a multiple of 8    u32, the checksum at their end included
//    16  file bytes                       u64
//    24  blocks, from                     u64 each, from <= blocks
//    40  key of the file                  16 bytes: runtime/prefix/prefix_hash.h, of `blocks` blocks
//    56  key of `parent`                  16 bytes, 0 when from = 0
//    72  key of `from` blocks             16 bytes, 0 when from = 0
//    88  layout version, snapshot kind    u32 each
//    96  kda_layers heads dim conv_taps mla_layers rank rope      u64 each
//   152  bytes of the model's name, checksum of the slab          u32 each
//   160  the model's name (PrefixModel), padded with 0 to a multiple of 8
//     .  keys of blocks from + 1 .. blocks          16 bytes each
//     .  checksums of their latents                 u32 each, padded with 0 to a multiple of 8
//     .  0, checksum of the header up to here       u32 each
//     .  slab: for each KDA layer [S | conv], f32
//     .  latents of blocks from + 1 .. blocks: for each MLA layer [64][rank + rope], f32
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/cache/state_layout.h"
#include "runtime/prefix/prefix_key.h"
#include "runtime/prefix/prefix_tree.h"
#include "runtime/store/byte_reader.h"
#include "runtime/store/refusal.h"

namespace deltamesh {

inline constexpr uint32_t kStateFileVersion = 1;
inline constexpr int64_t kStateHeaderBytesMax = int64_t{32} << 20;  // 1.6 million blocks

// Whose states a store holds.
struct StateIdentity {
  std::string model;  // PrefixModel
  StateLayout layout;
};

struct StateHeader {
  StateIdentity identity;
  PrefixKey key, parent, from_key;
  int64_t blocks = 0;
  int64_t from = 0;
  SnapshotKind kind{};
  std::vector<PrefixKey> keys;      // of blocks from + 1 .. blocks
  std::vector<uint32_t> checksums;  // of their latents
  uint32_t slab_checksum = 0;

  int64_t header_bytes() const;
  int64_t slab_bytes() const { return identity.layout.snapshot_bytes(); }
  int64_t block_bytes() const { return identity.layout.block_bytes(); }
  int64_t slab_offset() const { return header_bytes(); }
  int64_t block_offset(int64_t block) const {  // from <= block < blocks
    return slab_offset() + slab_bytes() + (block - from) * block_bytes();
  }
  int64_t file_bytes() const { return block_offset(blocks); }
};

// `checksums` and `keys` must have blocks - from entries.
std::string EncodeStateHeader(const StateHeader& header);

// Reads and checks the header of a file whose size `reader` knows; refuses by name. Whose state it is, is
// not looked at.
absl::StatusOr<StateHeader> ReadStateHeader(ByteReader& reader);
// Refuses what is not of `identity` or does not stand at `key`.
absl::Status CheckStateHeader(const StateHeader& header, const StateIdentity& identity,
                              const PrefixKey& key);

// The key that 32 hex digits name; false when `text` is something else.
bool ParseKeyHex(std::string_view text, PrefixKey* key);

uint32_t ChecksumOf(std::span<const std::byte> bytes);

}  // namespace deltamesh
