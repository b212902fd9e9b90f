// What has arrived of one state: checks each message of a hand-off against the plan and the others, and says
// where payloads go. Knows no peers, no time and no locks.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "runtime/transfer/handoff_types.h"

namespace deltamesh {

// Why a message was refused; NONE when it was not.
struct Refusal {
  mesh::RefusalReason reason = mesh::NONE;
  std::string detail;

  bool ok() const { return reason == mesh::NONE; }
};

// Not thread-safe.
class IncomingState {
 public:
  // Content goes into `slab` and into `blocks` [position / kBlockTokens], of which the first `have_blocks`
  // are not written.
  IncomingState(const StateLayout& layout, int64_t position, int64_t have_blocks, float* slab,
                std::vector<float*> blocks);

  const RegionPlan& plan() const { return plan_; }
  uint64_t landed_bytes() const { return landed_bytes_; }
  bool accepted() const { return accepted_; }  // the manifest was taken
  bool sealed() const { return sealed_; }
  int64_t restored_tokens() const { return restored_tokens_; }  // as the seal has it
  // Sealed, and every byte of every region has landed.
  bool whole() const { return sealed_ && landed_bytes_ == static_cast<uint64_t>(plan_.bytes()); }

  // Accepts the manifest when it names the model and exactly the planned regions.
  Refusal TakeManifest(const mesh::Manifest& manifest, const HandoffIdentity& identity);

  // Reserves a segment's range; `where` is where its payload must land. Only the caller can see that it has
  // the segment's checksum.
  Refusal TakeSegment(const mesh::Segment& segment, int64_t payload_bytes,
                      std::span<std::byte>& where);
  // The segment at `offset` is in place and its checksum was right.
  void Landed(uint32_t region, uint64_t offset);

  Refusal TakeSeal(const mesh::Seal& seal);
  // For a whole state: whether each region's content agrees with the seal.
  Refusal CheckSeal() const;

  // "KDA_STATE layer 3", for messages.
  std::string RegionName(uint32_t region) const;
  // The first region that is not complete, with counts.
  std::string FirstMissing() const;

 private:
  struct Piece {
    uint64_t length = 0;
    uint32_t crc = 0;
  };
  // One region of the manifest.
  struct Progress {
    int64_t planned = -1;  // index in the plan
    std::span<std::byte> memory;
    uint64_t landed_bytes = 0;
    std::map<uint64_t, Piece> pieces;  // by offset; no two overlap
  };

  Refusal TakeRegions(const mesh::Manifest& manifest);
  std::span<std::byte> Memory(int64_t planned) const;

  const StateLayout layout_;
  const RegionPlan plan_;
  float* const slab_;
  const std::vector<float*> blocks_;
  bool accepted_ = false;
  bool sealed_ = false;
  std::vector<Progress> regions_;  // in the manifest's order
  std::vector<uint32_t> seal_;     // checksums by region
  uint64_t landed_bytes_ = 0;
  int64_t restored_tokens_ = 0;
};

}  // namespace deltamesh
