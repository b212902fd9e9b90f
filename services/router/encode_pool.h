// Threads for work on a request that takes long: parsing, rendering and tokenising large inputs. The
// threads that serve ports hand it over here, so that health checks, metrics and small requests do not
// wait behind it.
//
// What nobody is to be answered from (counting tokens) goes aside: it costs its client nothing, so it takes
// a part of the places, leaves a thread free where there are several, and waits while anything else does;
// but not for ever: after kPassedOverMax others it has its turn.
//
// Thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace deltamesh {

struct EncodePoolOptions {
  int threads = 2;
  int64_t queue_max = 16;              // inputs that wait for a thread; each is held in memory
  int64_t aside_max = 4;               // and so many more that are aside
  int64_t inline_bytes_max = 8 << 10;  // smaller inputs are not worth the way through the pool
};

class EncodePool {
 public:
  static constexpr int kPassedOverMax = 8;

  explicit EncodePool(EncodePoolOptions options);
  // Runs what is queued.
  ~EncodePool();
  EncodePool(const EncodePool&) = delete;
  EncodePool& operator=(const EncodePool&) = delete;

  // RESOURCE_EXHAUSTED when the queue is full; `job` is dropped then.
  absl::Status Post(std::function<void()> job);
  absl::Status PostAside(std::function<void()> job);
  int64_t queued() const {
    absl::MutexLock lock(&mu_);
    return static_cast<int64_t>(jobs_.size() + asides_.size());
  }
  // Whether an input of this size goes through the pool.
  bool Takes(size_t bytes) const { return static_cast<int64_t>(bytes) > options_.inline_bytes_max; }

 private:
  using Jobs = std::deque<std::function<void()>>;

  void Loop();
  absl::Status PostTo(Jobs& jobs, int64_t most, std::function<void()> job);
  bool AsideReady() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !asides_.empty() && (closed_ || asides_running_ < std::max(1, options_.threads - 1));
  }
  // Whether the next one is taken from those aside.
  bool TakesAside() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return AsideReady() && (jobs_.empty() || passed_over_ >= kPassedOverMax);
  }
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return closed_ || !jobs_.empty() || AsideReady();
  }

  const EncodePoolOptions options_;
  mutable absl::Mutex mu_;
  Jobs jobs_ ABSL_GUARDED_BY(mu_), asides_ ABSL_GUARDED_BY(mu_);
  int asides_running_ ABSL_GUARDED_BY(mu_) = 0;
  int passed_over_ ABSL_GUARDED_BY(mu_) = 0;  // jobs taken since one aside could have been
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace deltamesh
