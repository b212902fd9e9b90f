// What to load of a checkpoint, and how.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace deltamesh {

// Which routed experts to load.
struct ExpertSelection {
  enum class Kind { kAll, kNone, kList } kind = Kind::kAll;
  std::vector<int32_t> experts;  // for kList
};

struct LoadOptions {
  ExpertSelection experts;
  bool only_experts = false;  // an expert shard: nothing but its experts is loaded
  int threads = 1;            // used while packing
  // Called now and then with bytes done and bytes in all; may be null.
  std::function<void(int64_t, int64_t)> progress;
};

}  // namespace deltamesh
