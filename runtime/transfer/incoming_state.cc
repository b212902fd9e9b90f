#include "runtime/transfer/incoming_state.h"

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/transfer/crc32c_combine.h"

namespace deltamesh {
namespace {

// A segment shorter than this must end its region; bounds the pieces a region can be cut into.
constexpr uint64_t kSegmentBytesMin = 4096;

template <typename... Args>
Refusal Refuse(mesh::RefusalReason reason, const absl::FormatSpec<Args...>& format,
               const Args&... args) {
  return {reason, absl::StrFormat(format, args...)};
}

// The first difference between `region` and the planned one, or empty.
std::string ShapeError(const mesh::Region& region, const mesh::Region& planned) {
  if (region.dtype() != planned.dtype()) return "element type differs; FLOAT32 is expected";
  if (region.bytes() != planned.bytes()) {
    return absl::StrFormat("%d bytes; %d are expected", region.bytes(), planned.bytes());
  }
  if (region.head_begin() != planned.head_begin() || region.head_end() != planned.head_end()) {
    return absl::StrFormat("heads [%d, %d); [%d, %d) are expected", region.head_begin(),
                           region.head_end(), planned.head_begin(), planned.head_end());
  }
  return "";
}

}  // namespace

IncomingState::IncomingState(const StateLayout& layout, int64_t position, int64_t have_blocks,
                             float* slab, std::vector<float*> blocks)
    : layout_(layout),
      plan_(layout, position, have_blocks),
      slab_(slab),
      blocks_(std::move(blocks)) {
  CHECK(static_cast<int64_t>(blocks_.size()) >= plan_.blocks(), "%d blocks for %d", blocks_.size(),
        plan_.blocks());
}

Refusal IncomingState::TakeManifest(const mesh::Manifest& manifest,
                                    const HandoffIdentity& identity) {
  if (manifest.model_digest() != identity.digest) {
    return Refuse(mesh::WRONG_MODEL, "sender has model %s, receiver %s", manifest.model_digest(),
                  identity.digest);
  }
  if (manifest.state_layout() != identity.state_layout) {
    return Refuse(mesh::WRONG_LAYOUT, "sender has state layout %d, receiver %d",
                  manifest.state_layout(), identity.state_layout);
  }
  if (manifest.position() != static_cast<uint64_t>(plan_.position())) {
    return Refuse(mesh::WRONG_COUNT, "state of %d tokens; %d were asked for", manifest.position(),
                  plan_.position());
  }
  Refusal refusal = TakeRegions(manifest);
  accepted_ = refusal.ok();
  return refusal;
}

// Every planned region exactly once and in the planned shape, nothing else.
Refusal IncomingState::TakeRegions(const mesh::Manifest& manifest) {
  if (manifest.regions_size() > plan_.size()) {
    return Refuse(mesh::WRONG_REGION, "%d regions; %d are expected (extra)",
                  manifest.regions_size(), plan_.size());
  }
  std::vector<bool> seen(static_cast<size_t>(plan_.size()));
  regions_.clear();
  regions_.reserve(seen.size());
  for (int i = 0; i < manifest.regions_size(); ++i) {
    const mesh::Region& region = manifest.regions(i);
    const int64_t planned = plan_.Find(region);
    if (region.index() != static_cast<uint32_t>(i) || planned < 0) {
      return Refuse(mesh::WRONG_REGION, "region %d (kind %d, layer %d, block %d) is extra", i,
                    static_cast<int>(region.kind()), region.layer(), region.block());
    }
    const std::string name = plan_.Name(planned);
    if (seen[static_cast<size_t>(planned)])
      return Refuse(mesh::WRONG_REGION, "%s is listed twice", name);
    seen[static_cast<size_t>(planned)] = true;
    if (const std::string error = ShapeError(region, plan_.At(planned)); !error.empty()) {
      return Refuse(mesh::WRONG_REGION, "%s: %s", name, error);
    }
    if (region.token_count() != manifest.position()) {
      return Refuse(mesh::WRONG_COUNT, "%s reflects %d tokens, the manifest %d", name,
                    region.token_count(), manifest.position());
    }
    Progress progress;
    progress.planned = planned;
    progress.memory = Memory(planned);
    regions_.push_back(std::move(progress));
  }
  const auto missing = std::find(seen.begin(), seen.end(), false);
  if (missing == seen.end()) return {};
  return Refuse(mesh::WRONG_REGION, "%s is missing", plan_.Name(missing - seen.begin()));
}

Refusal IncomingState::TakeSegment(const mesh::Segment& segment, int64_t payload_bytes,
                                   std::span<std::byte>& where) {
  if (!accepted_) return Refuse(mesh::MALFORMED, "data before an accepted manifest");
  if (segment.region() >= regions_.size()) {
    return Refuse(mesh::WRONG_RANGE, "region %d of %d", segment.region(), regions_.size());
  }
  Progress& region = regions_[segment.region()];
  const uint64_t size = region.memory.size();
  const uint64_t offset = segment.offset();
  const uint64_t length = segment.length();
  if (length == 0 || length != static_cast<uint64_t>(payload_bytes) || offset > size ||
      length > size - offset || (length < kSegmentBytesMin && offset + length != size)) {
    return Refuse(mesh::WRONG_RANGE, "%s: [%d, +%d) with a payload of %d, region of %d bytes",
                  plan_.Name(region.planned), offset, length, payload_bytes, size);
  }
  const auto next = region.pieces.lower_bound(offset);
  const bool hits_next = next != region.pieces.end() && next->first < offset + length;
  const bool hits_previous = next != region.pieces.begin() &&
                             std::prev(next)->first + std::prev(next)->second.length > offset;
  if (hits_next || hits_previous) {
    return Refuse(mesh::WRONG_RANGE, "%s: [%d, +%d) was sent twice", plan_.Name(region.planned),
                  offset, length);
  }
  region.pieces[offset] = Piece{length, segment.crc32c()};
  where = region.memory.subspan(offset, length);
  return {};
}

void IncomingState::Landed(uint32_t region, uint64_t offset) {
  const uint64_t length = regions_[region].pieces.at(offset).length;
  regions_[region].landed_bytes += length;
  landed_bytes_ += length;
}

Refusal IncomingState::TakeSeal(const mesh::Seal& seal) {
  if (!accepted_) return Refuse(mesh::MALFORMED, "a seal before an accepted manifest");
  if (sealed_) return Refuse(mesh::MALFORMED, "sealed twice");
  if (static_cast<size_t>(seal.region_crc32c_size()) != regions_.size()) {
    return Refuse(mesh::MALFORMED, "%d checksums for %d regions", seal.region_crc32c_size(),
                  regions_.size());
  }
  if (seal.restored_tokens() > static_cast<uint64_t>(plan_.position())) {
    return Refuse(mesh::WRONG_COUNT, "%d tokens restored of a state at %d", seal.restored_tokens(),
                  plan_.position());
  }
  sealed_ = true;
  restored_tokens_ = static_cast<int64_t>(seal.restored_tokens());
  seal_.assign(seal.region_crc32c().begin(), seal.region_crc32c().end());
  return {};
}

// The pieces cover each region without overlap, so their checksums give the region's.
Refusal IncomingState::CheckSeal() const {
  for (size_t i = 0; i < regions_.size(); ++i) {
    uint32_t crc = 0;
    for (const auto& [offset, piece] : regions_[i].pieces)
      crc = Crc32cCombine(crc, piece.crc, piece.length);
    if (crc == seal_[i]) continue;
    return Refuse(mesh::CHECKSUM, "%s: content %08x, seal %08x", plan_.Name(regions_[i].planned),
                  crc, seal_[i]);
  }
  return {};
}

std::string IncomingState::RegionName(uint32_t region) const {
  return plan_.Name(regions_[region].planned);
}

std::string IncomingState::FirstMissing() const {
  for (const Progress& region : regions_) {
    if (region.landed_bytes == region.memory.size()) continue;
    return absl::StrFormat("%s: %d of %d bytes arrived; %d of %d in all",
                           plan_.Name(region.planned), region.landed_bytes, region.memory.size(),
                           landed_bytes_, plan_.bytes());
  }
  return "nothing is missing";
}

std::span<std::byte> IncomingState::Memory(int64_t planned) const {
  const mesh::Region region = plan_.At(planned);
  switch (region.kind()) {
    case mesh::KDA_STATE:
      return std::as_writable_bytes(SlabStateSpan(layout_, slab_, region.layer()));
    case mesh::CONV_STATE:
      return std::as_writable_bytes(SlabConvSpan(layout_, slab_, region.layer()));
    default:
      return std::as_writable_bytes(
          BlockLatentsSpan(layout_, blocks_[region.block()], region.layer()));
  }
}

}  // namespace deltamesh
