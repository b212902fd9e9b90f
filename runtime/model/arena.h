// One anonymous mapping that holds all packed weights: one size, one lifetime, zeroed by the
// kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

namespace deltamesh {

// Move-only. Filled at fixed offsets; several threads may write disjoint parts.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;

  // RESOURCE_EXHAUSTED when the system has no such range.
  static absl::StatusOr<Arena> Create(int64_t bytes);

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace deltamesh
