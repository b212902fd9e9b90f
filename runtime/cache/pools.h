// Memory of sequences: slabs (recurrent state, one per resident sequence) and latent blocks (64 tokens of
// all MLA layers). Each pool reserves its memory once; a full pool is RESOURCE_EXHAUSTED, never an abort.
//
// Thread-safe: handles may be taken and dropped on any thread (a transfer drops its own on the transport's
// thread). Contents are not guarded: one writer at a time, and a block that is full is never written again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/statusor.h"

namespace deltamesh {

class FixedPool;

// A counted reference to one slot; copying pins the slot once more, the last one frees it.
class SlotRef {
 public:
  SlotRef() = default;
  SlotRef(const SlotRef& other);
  SlotRef(SlotRef&& other) noexcept;
  SlotRef& operator=(SlotRef other) noexcept;
  ~SlotRef();

  explicit operator bool() const { return pool_ != nullptr; }
  float* data() const;  // slot_floats of the pool, 64-byte aligned
  int64_t index() const { return index_; }
  int64_t use_count() const;  // references to this slot

 private:
  friend class FixedPool;
  SlotRef(std::shared_ptr<FixedPool> pool, int64_t index) : pool_(std::move(pool)), index_(index) {}
  std::shared_ptr<FixedPool> pool_;
  int64_t index_ = -1;
};

// `slots` equal pieces of one reservation. Memory is committed by the system when first touched.
class FixedPool : public std::enable_shared_from_this<FixedPool> {
 public:
  // `name` is used in messages: "slab pool", "latent block pool".
  static absl::StatusOr<std::shared_ptr<FixedPool>> Create(const char* name, int64_t slots,
                                                           int64_t slot_floats);
  ~FixedPool();

  // Contents of a new slot are undefined. RESOURCE_EXHAUSTED names the pool, its size and the flag's remedy.
  absl::StatusOr<SlotRef> Take();

  // Asked by Take, on its thread and without a lock, when no slot is free: gives up a reference it could do
  // without. False: it has none left. Asked again until a slot is free. `reclaimable` says how many slots
  // would become free if all were given up. Null: nobody to ask.
  void SetReclaim(std::function<bool()> reclaim, std::function<int64_t()> reclaimable);
  // Whether so many slots could be taken now, without giving anything up for it. Same thread as Take.
  bool CouldTake(int64_t slots) const;

  int64_t slots() const;
  int64_t free_slots() const;
  int64_t slot_floats() const;
  // How many of these slots have exactly one reference.
  int64_t CountUnshared(std::span<const int64_t> slots) const;

 private:
  friend class SlotRef;
  struct Impl;
  explicit FixedPool(std::unique_ptr<Impl> impl);
  void Ref(int64_t index);
  void Unref(int64_t index);
  int64_t TakeIndex();  // -1: none is free
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltamesh
