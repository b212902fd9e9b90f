#include "runtime/base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/base/status.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace deltamesh {
namespace {

using Body = absl::FunctionRef<void(int64_t, int64_t)>;

// The word that guards a job: how many workers are inside, whether more may enter, and a number that
// tells jobs apart (it wraps; a worker that takes one job for another enters the one that is there).
constexpr uint32_t kInside = 0xffff;
constexpr uint32_t kOpen = 0x10000;
constexpr uint32_t kNextJob = 0x20000;

constexpr int kPausesPerLook = 16;

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Looks at `done` for at most `spin`; whether it held.
template <typename Done>
bool SpinUntil(std::chrono::nanoseconds spin, Done done) {
  if (done()) return true;
  if (spin.count() <= 0) return false;
  const auto end = std::chrono::steady_clock::now() + spin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) Pause();
    if (done()) return true;
    std::this_thread::yield();  // whoever has work goes first
    if (done()) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

struct ThreadPool::Shared {
  const std::chrono::nanoseconds spin;

  alignas(64) std::atomic<uint32_t> word{0};
  alignas(64) std::atomic<uint32_t> jobs{0};  // begun; workers sleep on it
  std::atomic<bool> stop{false};

  // The current job. The caller writes it while the word is closed and nobody is inside; opening the word
  // publishes it.
  const Body* body = nullptr;
  int64_t n = 0;
  int64_t chunk = 1;
  alignas(64) std::atomic<int64_t> next{0};

  std::vector<std::thread> workers;

  explicit Shared(std::chrono::nanoseconds longest) : spin(longest) {}

  void Stop() {
    stop.store(true, std::memory_order_release);
    jobs.fetch_add(1, std::memory_order_release);
    jobs.notify_all();
    for (std::thread& t : workers) t.join();
  }

  void RunChunks() {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= n) return;
      (*body)(begin, std::min(n, begin + chunk));
    }
  }

  void Join() {
    uint32_t seen = word.load(std::memory_order_relaxed);
    do {
      if ((seen & kOpen) == 0) return;
    } while (!word.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire,
                                         std::memory_order_relaxed));
    RunChunks();
    // The last one out of a closed job ends the caller's wait.
    const uint32_t before = word.fetch_sub(1, std::memory_order_release);
    if ((before & (kOpen | kInside)) == 1) word.notify_one();
  }

  void WorkerLoop() {
    uint32_t seen = 0;
    const auto called = [&] {
      return stop.load(std::memory_order_relaxed) || jobs.load(std::memory_order_acquire) != seen;
    };
    for (;;) {
      if (!SpinUntil(spin, called)) jobs.wait(seen, std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      seen = jobs.load(std::memory_order_acquire);
      Join();
    }
  }

  void Begin(int64_t pieces) {
    const uint32_t last = word.load(std::memory_order_relaxed);
    word.store(((last & ~kOpen) + kNextJob) | kOpen, std::memory_order_release);
    jobs.fetch_add(1, std::memory_order_release);
    if (pieces > static_cast<int64_t>(workers.size())) {
      jobs.notify_all();
    } else {
      for (int64_t i = 1; i < pieces; ++i) jobs.notify_one();
    }
  }

  void End() {
    uint32_t now = word.fetch_and(~kOpen, std::memory_order_acquire) & ~kOpen;
    const auto alone = [&] {
      now = word.load(std::memory_order_acquire);
      return (now & kInside) == 0;
    };
    while (!SpinUntil(spin, alone)) word.wait(now, std::memory_order_acquire);
  }
};

ThreadPool::ThreadPool(int threads, absl::Duration spin)
    : shared_(std::make_unique<Shared>(
          std::chrono::nanoseconds(std::max<int64_t>(0, absl::ToInt64Nanoseconds(spin))))) {
  CHECK(threads >= 1 && threads <= static_cast<int>(kInside), "threads=%d", threads);
  try {
    for (int i = 1; i < threads; ++i) {
      shared_->workers.emplace_back([s = shared_.get()] { s->WorkerLoop(); });
    }
  } catch (const std::system_error&) {  // the system refuses another thread
    shared_->Stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { shared_->Stop(); }

int ThreadPool::threads() const { return static_cast<int>(shared_->workers.size()) + 1; }

void ThreadPool::ParallelFor(int64_t n, int64_t grain, Body body) {
  if (n <= 0) return;
  Shared& s = *shared_;
  if (s.workers.empty() || n <= grain) {
    body(0, n);
    return;
  }
  s.body = &body;
  s.n = n;
  // Four pieces a thread even out uneven work without many hand-outs.
  s.chunk = std::max<int64_t>(grain, (n + threads() * 4 - 1) / (threads() * 4));
  s.next.store(0, std::memory_order_relaxed);
  s.Begin((n + s.chunk - 1) / s.chunk);
  s.RunChunks();
  s.End();
}

}  // namespace deltamesh
