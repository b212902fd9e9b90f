#include "services/cli/roofline.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/probe/probe.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Sum over threads of the rate that each measures, all started together.
double OnThreads(int threads, const std::function<double(int)>& rate) {
  std::vector<double> rates(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  std::atomic<int> ready{0};
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      ++ready;
      while (ready < threads) std::this_thread::yield();
      rates[static_cast<size_t>(t)] = rate(t);
    });
  }
  double sum = 0;
  for (int t = 0; t < threads; ++t) {
    workers[static_cast<size_t>(t)].join();
    sum += rates[static_cast<size_t>(t)];
  }
  return sum;
}

Ceiling Repeat(int repetitions, const std::function<double()>& measure) {
  std::vector<double> values;
  for (int r = 0; r < repetitions; ++r) values.push_back(measure());
  std::sort(values.begin(), values.end());
  return {.best = values.back(), .median = values[values.size() / 2]};
}

class Buffer {
 public:
  explicit Buffer(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return;
    data_ = static_cast<std::byte*>(p);
    madvise(data_, bytes_, MADV_HUGEPAGE);
    std::memset(data_, 1, bytes_);
  }
  ~Buffer() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  const std::byte* data() const { return data_; }

 private:
  size_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace

absl::StatusOr<Roofline> MeasureRoofline(const RooflineOptions& o) {
  if (o.threads < 1 || o.repetitions < 1 || o.buffer_bytes < 1 << 20) {
    return InvalidArgument(
        "roofline: threads=%d repetitions=%d buffer_bytes=%d; use at least 1, 1 and 1 MiB",
        o.threads, o.repetitions, o.buffer_bytes);
  }
  const Buffer buffer(o.buffer_bytes);
  if (buffer.data() == nullptr) {
    return ResourceExhausted("roofline: no %d bytes for the read probe; use a smaller buffer",
                             o.buffer_bytes);
  }
  Roofline result;
  result.threads = o.threads;
  static std::atomic<uint64_t> sink{0};  // keeps the probes' results alive
  const int64_t part = o.buffer_bytes / o.threads / 1024 * 1024;
  for (const int streams : {1, 2, 4}) {  // the access pattern that suits the machine is its ceiling
    const Ceiling c = Repeat(o.repetitions, [&] {
      return OnThreads(o.threads, [&](int t) {
        double bytes = 0;
        const double start = Seconds();
        do {
          sink += kernels::ReadProbe(buffer.data() + t * part, part, streams);
          bytes += static_cast<double>(part);
        } while (Seconds() - start < o.seconds);
        return bytes / (Seconds() - start);
      });
    });
    if (c.best > result.read_bytes_per_second.best) result.read_bytes_per_second = c;
  }
  result.fma_flops = Repeat(o.repetitions, [&] {
    return OnThreads(o.threads, [&](int) {
      double flops = 0;
      float value = 0;
      const double start = Seconds();
      do {
        flops += kernels::FmaProbe(100'000, &value);
        sink += static_cast<uint64_t>(value);
      } while (Seconds() - start < o.seconds);
      return flops / (Seconds() - start);
    });
  });
  return result;
}

}  // namespace deltamesh
