#include "runtime/model/workspace.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "runtime/base/status.h"

namespace deltamesh {

namespace {
constexpr int64_t kAlign = 64;
constexpr int64_t kSegmentBytesMin = int64_t{1} << 20;
constexpr int64_t kHugePage = int64_t{2} << 20;
}  // namespace

void Workspace::Free::operator()(std::byte* p) const { std::free(p); }

Workspace::Segment Workspace::Allocate(int64_t bytes) {
  const int64_t unit = bytes >= kHugePage ? kHugePage : kAlign;
  const auto size = static_cast<size_t>((bytes + unit - 1) / unit * unit);
  void* p = std::aligned_alloc(static_cast<size_t>(unit), size);
  CHECK(p != nullptr, "no memory for a workspace of %d bytes", size);
  if (unit == kHugePage) madvise(p, size, MADV_HUGEPAGE);  // a wish; works without
  return {std::unique_ptr<std::byte, Free>(static_cast<std::byte*>(p)), bytes};
}

int64_t Workspace::bytes() const {
  int64_t total = 0;
  for (const Segment& s : segments_) total += s.bytes;
  return total;
}

void* Workspace::TakeBytes(int64_t bytes) {
  CHECK(bytes >= 0 && open_scopes_ > 0, "%d bytes in %d scopes", bytes, open_scopes_);
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  while (segment_ < segments_.size() && used_ + bytes > segments_[segment_].bytes) {
    ++segment_;
    used_ = 0;
  }
  if (segment_ == segments_.size()) {
    // As much again as is held already keeps the number of segments logarithmic.
    segments_.push_back(Allocate(std::max({bytes, kSegmentBytesMin, this->bytes()})));
  }
  void* p = segments_[segment_].data.get() + used_;
  used_ += bytes;
  in_use_ += bytes;
  peak_ = std::max(peak_, in_use_);
  return p;
}

void Workspace::Release(size_t segment, int64_t used, int64_t in_use) {
  segment_ = segment;
  used_ = used;
  in_use_ = in_use;
  if (--open_scopes_ > 0 || segments_.size() < 2) return;
  // Nothing is in use: one segment of the largest step's size serves the next one without gaps.
  segments_.clear();
  segments_.push_back(Allocate(peak_));
}

}  // namespace deltamesh
