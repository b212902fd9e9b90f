#include "runtime/cache/pools.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "runtime/base/status.h"

namespace deltamesh {

struct FixedPool::Impl {
  const char* name;
  int64_t slots;
  int64_t slot_floats;
  int64_t stride_floats;  // slot_floats rounded up to a cache line
  float* base = nullptr;
  int64_t bytes = 0;
  std::function<bool()> reclaim;
  std::function<int64_t()> reclaimable;

  mutable std::mutex mutex;
  std::vector<int64_t> free_list;  // guarded by mutex
  std::vector<int64_t> refs;       // guarded by mutex
};

FixedPool::FixedPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

FixedPool::~FixedPool() {
  if (impl_->base != nullptr) munmap(impl_->base, static_cast<size_t>(impl_->bytes));
}

absl::StatusOr<std::shared_ptr<FixedPool>> FixedPool::Create(const char* name, int64_t slots,
                                                             int64_t slot_floats) {
  if (slots < 0 || slot_floats < 0) {
    return InvalidArgument("%s: %d slots of %d floats; both must be at least 0", name, slots,
                           slot_floats);
  }
  auto impl = std::make_unique<Impl>();
  impl->name = name;
  impl->slots = slots;
  impl->slot_floats = slot_floats;
  impl->stride_floats = (slot_floats + 15) / 16 * 16;
  if (__builtin_mul_overflow(slots * 4, impl->stride_floats, &impl->bytes)) {
    return InvalidArgument("%s: %d slots of %d floats overflow 64 bits", name, slots, slot_floats);
  }
  if (impl->bytes > 0) {
    void* p = mmap(nullptr, static_cast<size_t>(impl->bytes), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      return ResourceExhausted("%s: cannot reserve %d bytes: %s; make the pool smaller", name,
                               impl->bytes, std::strerror(errno));
    }
    // Large pages save address translation where state is streamed; without them it only runs slower.
    madvise(p, static_cast<size_t>(impl->bytes), MADV_HUGEPAGE);
    impl->base = static_cast<float*>(p);
  }
  impl->refs.assign(static_cast<size_t>(slots), 0);
  impl->free_list.reserve(static_cast<size_t>(slots));
  for (int64_t i = slots - 1; i >= 0; --i) impl->free_list.push_back(i);
  return std::shared_ptr<FixedPool>(new FixedPool(std::move(impl)));
}

absl::StatusOr<SlotRef> FixedPool::Take() {
  int64_t index = TakeIndex();
  while (index < 0 && impl_->reclaim != nullptr && impl_->reclaim()) index = TakeIndex();
  if (index < 0) {
    return ResourceExhausted(
        "%s: all %d slots are in use; retry later, or start with a larger pool", impl_->name,
        impl_->slots);
  }
  return SlotRef(shared_from_this(), index);
}

int64_t FixedPool::TakeIndex() {
  std::lock_guard lock(impl_->mutex);
  if (impl_->free_list.empty()) return -1;
  const int64_t index = impl_->free_list.back();
  impl_->free_list.pop_back();
  CHECK(impl_->refs[index] == 0, "%s slot %d was free with references", impl_->name, index);
  impl_->refs[index] = 1;
  return index;
}

void FixedPool::SetReclaim(std::function<bool()> reclaim, std::function<int64_t()> reclaimable) {
  impl_->reclaim = std::move(reclaim);
  impl_->reclaimable = std::move(reclaimable);
}

bool FixedPool::CouldTake(int64_t slots) const {
  const int64_t free = free_slots();
  return slots <= free || (impl_->reclaimable != nullptr && slots <= free + impl_->reclaimable());
}

int64_t FixedPool::slots() const { return impl_->slots; }
int64_t FixedPool::slot_floats() const { return impl_->slot_floats; }

int64_t FixedPool::free_slots() const {
  std::lock_guard lock(impl_->mutex);
  return static_cast<int64_t>(impl_->free_list.size());
}

int64_t FixedPool::CountUnshared(std::span<const int64_t> slots) const {
  std::lock_guard lock(impl_->mutex);
  return std::count_if(slots.begin(), slots.end(),
                       [&](int64_t slot) { return impl_->refs[static_cast<size_t>(slot)] == 1; });
}

void FixedPool::Ref(int64_t index) {
  std::lock_guard lock(impl_->mutex);
  CHECK(impl_->refs[index] > 0, "%s slot %d", impl_->name, index);
  ++impl_->refs[index];
}

void FixedPool::Unref(int64_t index) {
  std::lock_guard lock(impl_->mutex);
  CHECK(impl_->refs[index] > 0, "%s slot %d", impl_->name, index);
  if (--impl_->refs[index] == 0) impl_->free_list.push_back(index);
}

SlotRef::SlotRef(const SlotRef& other) : pool_(other.pool_), index_(other.index_) {
  if (pool_) pool_->Ref(index_);
}
SlotRef::SlotRef(SlotRef&& other) noexcept
    : pool_(std::move(other.pool_)), index_(std::exchange(other.index_, -1)) {
  other.pool_ = nullptr;
}
SlotRef& SlotRef::operator=(SlotRef other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(index_, other.index_);
  return *this;
}
SlotRef::~SlotRef() {
  if (pool_) pool_->Unref(index_);
}

float* SlotRef::data() const {
  CHECK(pool_ != nullptr, "an empty handle has no data");
  return pool_->impl_->base + index_ * pool_->impl_->stride_floats;
}

int64_t SlotRef::use_count() const {
  if (!pool_) return 0;
  std::lock_guard lock(pool_->impl_->mutex);
  return pool_->impl_->refs[index_];
}

}  // namespace deltamesh
