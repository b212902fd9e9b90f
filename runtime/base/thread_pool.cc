#include "runtime/base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/base/status.h"

namespace deltamesh {

struct ThreadPool::Shared {
  std::mutex mutex;
  std::condition_variable work_ready;
  std::condition_variable work_done;
  uint64_t generation = 0;  // guarded by mutex; one more per job
  int running = 0;          // guarded by mutex; workers still inside the current job
  bool stop = false;        // guarded by mutex

  // The current job; written under the mutex before `generation` grows.
  const std::function<void(int64_t, int64_t)>* body = nullptr;
  int64_t n = 0;
  int64_t chunk = 1;
  std::atomic<int64_t> next{0};

  std::vector<std::thread> workers;

  void RunChunks() {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= n) return;
      (*body)(begin, std::min(n, begin + chunk));
    }
  }

  void WorkerLoop() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      work_ready.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      lock.unlock();
      RunChunks();
      lock.lock();
      if (--running == 0) work_done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : shared_(std::make_unique<Shared>()) {
  CHECK(threads >= 1, "threads=%d", threads);
  for (int i = 1; i < threads; ++i) {
    shared_->workers.emplace_back([s = shared_.get()] { s->WorkerLoop(); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->work_ready.notify_all();
  for (std::thread& t : shared_->workers) t.join();
}

int ThreadPool::threads() const { return static_cast<int>(shared_->workers.size()) + 1; }

void ThreadPool::ParallelFor(int64_t n, int64_t grain,
                             const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  Shared& s = *shared_;
  if (s.workers.empty() || n <= grain) {
    body(0, n);
    return;
  }
  {
    std::lock_guard lock(s.mutex);
    s.body = &body;
    s.n = n;
    // Four pieces a thread even out uneven work without many hand-outs.
    s.chunk = std::max<int64_t>(grain, (n + threads() * 4 - 1) / (threads() * 4));
    s.next.store(0, std::memory_order_relaxed);
    s.running = static_cast<int>(s.workers.size());
    ++s.generation;
  }
  s.work_ready.notify_all();
  s.RunChunks();
  std::unique_lock lock(s.mutex);
  s.work_done.wait(lock, [&] { return s.running == 0; });
}

}  // namespace deltamesh
