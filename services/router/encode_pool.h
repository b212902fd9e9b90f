// Threads for work on a request that takes long: parsing, rendering and tokenising large inputs. The
// threads that serve ports hand it over here, so that health checks, metrics and small requests do not
// wait behind it.
//
// Thread-safe.
#pragma once

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
  int64_t inline_bytes_max = 8 << 10;  // smaller inputs are not worth the way through the pool
};

class EncodePool {
 public:
  explicit EncodePool(EncodePoolOptions options);
  // Runs what is queued.
  ~EncodePool();
  EncodePool(const EncodePool&) = delete;
  EncodePool& operator=(const EncodePool&) = delete;

  // RESOURCE_EXHAUSTED when the queue is full; `job` is dropped then.
  absl::Status Post(std::function<void()> job);
  int64_t queued() const {
    absl::MutexLock lock(&mu_);
    return static_cast<int64_t>(jobs_.size());
  }
  // Whether an input of this size goes through the pool.
  bool Takes(size_t bytes) const { return static_cast<int64_t>(bytes) > options_.inline_bytes_max; }

 private:
  void Loop();
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return closed_ || !jobs_.empty(); }

  const EncodePoolOptions options_;
  mutable absl::Mutex mu_;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace deltamesh
