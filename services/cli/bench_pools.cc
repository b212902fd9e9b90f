#include "services/cli/bench_pools.h"

#include "runtime/base/status.h"

namespace deltamesh {

absl::StatusOr<StatePools> BenchPools(const StateLayout& layout, int64_t sequences,
                                      int64_t tokens) {
  const int64_t blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  absl::StatusOr<StatePools> pools = StatePools::Create(layout, sequences, sequences * blocks);
  if (pools.ok()) return pools;
  const double bytes = static_cast<double>(sequences) *
                       (static_cast<double>(layout.slab_bytes()) +
                        static_cast<double>(blocks) * static_cast<double>(layout.block_bytes()));
  return ResourceExhausted(
      "%d x %d tokens: %.0f MiB of state do not fit into the memory available; use fewer tokens or "
      "sequences",
      sequences, tokens, bytes / (1 << 20));
}

}  // namespace deltamesh
