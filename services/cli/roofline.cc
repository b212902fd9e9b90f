#include "services/cli/roofline.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/gemm/int8_probe.h"
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
  std::atomic<bool> given_up{false};
  try {
    for (int t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        ++ready;
        while (ready < threads && !given_up) std::this_thread::yield();
        if (!given_up) rates[static_cast<size_t>(t)] = rate(t);
      });
    }
  } catch (const std::system_error&) {  // the system refuses another thread
    given_up = true;
    for (std::thread& worker : workers) worker.join();
    throw;
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

double FmaLoop(int64_t rounds, bool, float* sink) { return kernels::FmaProbe(rounds, sink); }

std::atomic<uint64_t> sink{0};  // keeps the probes' results alive

}  // namespace

class RooflineProbe::Buffer {
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

RooflineProbe::RooflineProbe(const RooflineOptions& options) : options_(options) {}
RooflineProbe::~RooflineProbe() = default;

absl::StatusOr<std::unique_ptr<RooflineProbe>> RooflineProbe::Create(const RooflineOptions& o) {
  if (o.threads < 1 || o.repetitions < 1 || o.buffer_bytes < 1 << 20) {
    return InvalidArgument(
        "roofline: threads=%d repetitions=%d buffer_bytes=%d; use at least 1, 1 and 1 MiB",
        o.threads, o.repetitions, o.buffer_bytes);
  }
  std::unique_ptr<RooflineProbe> probe(new RooflineProbe(o));
  probe->buffer_ = std::make_unique<Buffer>(o.buffer_bytes);
  if (probe->buffer_->data() == nullptr) {
    return ResourceExhausted("roofline: no %d bytes for the read probe; use a smaller buffer",
                             o.buffer_bytes);
  }
  Roofline& found = probe->roofline_;
  for (const int streams : {1, 2, 4, 8}) {
    const Ceiling c = Repeat(o.repetitions, [&] { return probe->Read(streams, o.seconds); });
    if (c.best <= found.read_bytes_per_second.best) continue;
    found.read_bytes_per_second = c;
    probe->streams_ = streams;
  }
  found.fma_flops = Repeat(o.repetitions, [&] { return probe->Rate(o.seconds, &FmaLoop); });
  found.int8_ops =
      Repeat(o.repetitions, [&] { return probe->Rate(o.seconds, &kernels::Int8Probe); });
  return probe;
}

double RooflineProbe::ReadBytesPerSecond() const { return Read(streams_, options_.seconds / 2); }

double RooflineProbe::FmaFlops() const { return Rate(options_.seconds / 2, &FmaLoop); }

double RooflineProbe::Int8Ops() const { return Rate(options_.seconds / 2, &kernels::Int8Probe); }

double RooflineProbe::Read(int streams, double seconds) const {
  const int64_t part = options_.buffer_bytes / options_.threads / 1024 * 1024;
  return OnThreads(options_.threads, [&](int t) {
    double bytes = 0;
    const double start = Seconds();
    do {
      sink += kernels::ReadProbe(buffer_->data() + t * part, part, streams);
      bytes += static_cast<double>(part);
    } while (Seconds() - start < seconds);
    return bytes / (Seconds() - start);
  });
}

double RooflineProbe::Rate(double seconds,
                           double (*loop)(int64_t rounds, bool mxfp4, float* sink)) const {
  return OnThreads(options_.threads, [&](int) {
    double done = 0;
    float value = 0;
    const double start = Seconds();
    do {
      done += loop(100'000, options_.mxfp4, &value);
      sink += static_cast<uint64_t>(value);
    } while (Seconds() - start < seconds);
    return done / (Seconds() - start);
  });
}

}  // namespace deltamesh
