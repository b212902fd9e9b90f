#include <time.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "services/cli/bench_router.h"
#include "services/router/prefix_index.h"

namespace deltamesh {
namespace {

constexpr int64_t kBlockTokens = 64;
constexpr int64_t kWorkers = 16;
constexpr size_t kBatch = 4096;  // facts a message of a worker holds
constexpr double kNanos = 1e-9;

double CpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * kNanos;
}

// Prompt i's block b is named by both; a worker has every kWorkers-th prompt.
class Prompts {
 public:
  explicit Prompts(int64_t blocks) : blocks_(blocks) {}

  std::vector<uint64_t> Keys(int64_t prompt) const {
    std::vector<uint64_t> keys;
    SeededEntropy entropy(static_cast<uint64_t>(prompt) + 1);
    for (int64_t b = 0; b < blocks_; ++b) keys.push_back(entropy.Next());
    return keys;
  }
  // Root first when added, leaf first when dropped; a snapshot each 256 blocks and at the end, all of them in
  // a bucket as well.
  std::vector<IndexChange> Changes(int64_t prompt, bool add) const {
    std::vector<IndexChange> out;
    const std::vector<uint64_t> keys = Keys(prompt);
    for (int64_t i = 0; i < blocks_; ++i) {
      const int64_t b = add ? i : blocks_ - 1 - i;
      const uint64_t key = keys[static_cast<size_t>(b)];
      const bool snapshot = (b + 1) % 256 == 0 || b + 1 == blocks_;
      if (snapshot && !add) out.push_back({IndexChange::kSnapshotDropped, key});
      out.push_back({add ? IndexChange::kLatentsAdded : IndexChange::kLatentsDropped, key});
      if (snapshot && add) out.push_back({IndexChange::kSnapshotAdded, key});
      if (snapshot)
        out.push_back({add ? IndexChange::kObjectAdded : IndexChange::kObjectDropped, key});
    }
    return out;
  }

 private:
  const int64_t blocks_;
};

// Applies whole prompts and counts the time of nothing else.
class Feeder {
 public:
  Feeder(PrefixIndex* index, const Prompts* prompts) : index_(index), prompts_(prompts) {
    for (int64_t w = 0; w < kWorkers; ++w) {
      workers_.push_back(index_->AddWorker());
      index_->Trust(workers_.back());
    }
  }
  void Apply(int64_t prompt, bool add) {
    const std::vector<IndexChange> changes = prompts_->Changes(prompt, add);
    const WorkerSlot worker = workers_[static_cast<size_t>(prompt % kWorkers)];
    const double start = CpuSeconds();
    for (size_t at = 0; at < changes.size(); at += kBatch) {
      index_->Apply(worker, std::span(changes).subspan(at, std::min(kBatch, changes.size() - at)));
    }
    seconds_ += CpuSeconds() - start;
    changes_ += static_cast<int64_t>(changes.size());
  }
  double changes_per_second() const { return static_cast<double>(changes_) / seconds_; }
  void Restart() { seconds_ = 0, changes_ = 0; }

 private:
  PrefixIndex* const index_;
  const Prompts* const prompts_;
  std::vector<WorkerSlot> workers_;
  double seconds_ = 0;
  int64_t changes_ = 0;
};

}  // namespace

std::vector<RouterFigure> MeasureIndex(const RouterBenchOptions& o) {
  const int64_t blocks = std::max<int64_t>(1, o.prompt_tokens / kBlockTokens);
  const int64_t held = std::max<int64_t>(kWorkers, o.index_blocks / blocks);
  const Prompts prompts(blocks);
  PrefixIndex index({.entries_max = 2 * o.index_blocks + 1024});
  Feeder feeder(&index, &prompts);
  for (int64_t p = 0; p < held; ++p) feeder.Apply(p, true);
  const int64_t bytes = index.bytes();
  const int64_t entries = index.entries() + index.snapshots() + index.objects();

  std::vector<double> micros;
  SeededEntropy entropy(7);
  constexpr int kLookups = 1000;
  for (int i = 0; i < kLookups; ++i) {
    const int64_t prompt = static_cast<int64_t>(entropy.Next() % static_cast<uint64_t>(held));
    std::vector<uint64_t> keys = prompts.Keys(prompt);
    // It goes on differently from somewhere on.
    for (size_t at = entropy.Next() % keys.size(); at < keys.size(); ++at) keys[at] ^= 1;
    const double start = CpuSeconds();
    const std::vector<IndexMatch> found = index.Find(keys);
    micros.push_back((CpuSeconds() - start) * 1e6);
    CHECK(found.size() <= 1, "a block of one worker was found at %d", found.size());
  }
  std::sort(micros.begin(), micros.end());

  feeder.Restart();
  int64_t bytes_max = bytes;
  for (int64_t p = 0; p < 2 * held; ++p) {  // what is held changes wholly, twice
    feeder.Apply(p, false);
    feeder.Apply(p + held, true);
    bytes_max = std::max(bytes_max, index.bytes());
  }
  return {
      {"lookup_p99_us", micros[micros.size() * 99 / 100], 50, false, "us"},
      {"index_changes_per_second", feeder.changes_per_second(), 7e6, true, "1/s"},
      {"index_bytes_per_entry", static_cast<double>(bytes) / static_cast<double>(entries), 32,
       false, "B"},
      {"index_growth_under_churn", static_cast<double>(bytes_max) / static_cast<double>(bytes),
       1.25, false, "x"},
  };
}

}  // namespace deltamesh
