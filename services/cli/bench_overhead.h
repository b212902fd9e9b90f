// What the mesh costs: tokens per second through a whole local mesh beside one engine in this process.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "services/cli/bench_engine.h"
#include "services/cli/bench_rows.h"
#include "services/cli/local_mesh.h"

namespace deltamesh {

struct OverheadOptions {
  LocalMeshOptions mesh;
  std::vector<int64_t> prefill;    // prompt lengths
  std::vector<int64_t> sequences;  // streams decoded at once
  int64_t decode_steps = 64;
  int repetitions = 3;
};

// `engine` has as many threads as each worker of the mesh, and takes turns with it on the same ids.
// Rows of a mesh with expert shards say so in their names: mesh-decode-2-shards.
// Rows that were measured before an error are added too.
absl::Status MeasureOverhead(const OverheadOptions& options, BenchEngine* engine,
                             std::vector<BenchRow>* rows);

}  // namespace deltamesh
