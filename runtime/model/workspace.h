// Scratch memory of forward passes: a grow-only stack of buffers.
//
// Take() bumps a pointer; a Scope gives back everything taken since it was opened. A step no larger than
// an earlier one allocates nothing. Not thread-safe: taken and released by the thread that runs the model,
// while pool threads only read and write what they were handed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace deltamesh {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // `count` values, 64-byte aligned, contents undefined, valid until the innermost open Scope ends.
  template <typename T>
  T* Take(int64_t count) {
    static_assert(std::is_trivially_destructible_v<T>, "nothing is destroyed on release");
    return static_cast<T*>(TakeBytes(count * static_cast<int64_t>(sizeof(T))));
  }
  float* Floats(int64_t count) { return Take<float>(count); }

  // Bytes held, whether in use or not.
  int64_t bytes() const;

  class Scope {
   public:
    explicit Scope(Workspace& workspace)
        : workspace_(workspace),
          segment_(workspace.segment_),
          used_(workspace.used_),
          in_use_(workspace.in_use_) {
      ++workspace_.open_scopes_;
    }
    ~Scope() { workspace_.Release(segment_, used_, in_use_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Workspace& workspace_;
    size_t segment_;
    int64_t used_;
    int64_t in_use_;
  };

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  struct Segment {
    std::unique_ptr<std::byte, Free> data;
    int64_t bytes;
  };
  static Segment Allocate(int64_t bytes);
  void* TakeBytes(int64_t bytes);
  void Release(size_t segment, int64_t used, int64_t in_use);

  std::vector<Segment> segments_;
  size_t segment_ = 0;  // the one Take() bumps; those behind it are full, those ahead are free
  int64_t used_ = 0;    // bytes taken from it
  int64_t in_use_ = 0;  // bytes handed out
  int64_t peak_ = 0;    // the most that ever were
  int64_t open_scopes_ = 0;
};

}  // namespace deltamesh
