// A fixed set of threads that share one job at a time.
//
// The caller works too and waits only for pieces that some thread is computing: a thread that got no core
// in time finds the job closed, and costs it nothing. So more threads than cores do no harm.
//
// After a job a thread looks for the next one for a bounded time, giving its core away at every look,
// before it sleeps: jobs follow each other within microseconds in a step, and waking a thread costs as
// much.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"

namespace deltamesh {

// One caller at a time uses a pool (an engine's step loop owns its pool).
class ThreadPool {
 public:
  static constexpr absl::Duration kSpin = absl::Microseconds(50);

  // `threads` >= 1 counts the calling thread: a pool of one runs everything inline. `spin` is the longest
  // look for the next job before sleeping; zero: none.
  explicit ThreadPool(int threads, absl::Duration spin = kSpin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls body(begin, end) over disjoint ranges that cover [0, n), in parallel, and returns when all
  // are done. `grain` is the smallest range worth a thread of its own. Results must not depend on how
  // the range was cut: bodies write disjoint outputs and reduce nothing across ranges.
  void ParallelFor(int64_t n, int64_t grain, absl::FunctionRef<void(int64_t, int64_t)> body);

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace deltamesh
