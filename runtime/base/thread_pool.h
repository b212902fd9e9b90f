// A fixed set of threads that share one job at a time. Idle threads sleep; nothing spins.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace deltamesh {

// One caller at a time uses a pool (an engine's step loop owns its pool).
class ThreadPool {
 public:
  // `threads` >= 1 counts the calling thread: a pool of one runs everything inline.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls body(begin, end) over disjoint ranges that cover [0, n), in parallel, and returns when all
  // are done. `grain` is the smallest range worth a thread of its own. Results must not depend on how
  // the range was cut: bodies write disjoint outputs and reduce nothing across ranges.
  void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace deltamesh
