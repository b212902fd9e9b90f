#include "runtime/model/arena.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

Arena::~Arena() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

absl::StatusOr<Arena> Arena::Create(int64_t bytes) {
  Arena arena;
  if (bytes == 0) return arena;
  // Not MAP_NORESERVE: a range that memory can never back is refused here, not killed half way.
  void* range = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (range == MAP_FAILED) {
    return ResourceExhausted(
        "weights: no memory for %d packed bytes; load fewer experts or use a larger machine",
        bytes);
  }
  // Large pages save address translation in matrix products; without them it only runs slower.
  madvise(range, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  arena.data_ = static_cast<std::byte*>(range);
  arena.size_ = bytes;
  return arena;
}

}  // namespace deltamesh
