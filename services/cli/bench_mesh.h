// `deltamesh bench-mesh`: tokens per second through a running mesh, as a client sees them over gRPC. Prints
// the rows of `deltamesh bench`, so that one divided by the other is what the mesh costs.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct BenchMeshOptions {
  std::string router = "127.0.0.1:8081";
  std::vector<int64_t> prefill = {512};  // prompt lengths
  std::vector<int64_t> sequences = {1};  // streams decoded at once
  int64_t decode_steps = 64;             // tokens of each
  int repetitions = 3;
  double seconds = 300;  // longest a request may take
  std::string label;
};
void AddBenchMeshFlags(CLI::App* app, BenchMeshOptions* options);

absl::Status RunBenchMesh(const BenchMeshOptions& options, std::ostream& out);

}  // namespace deltamesh
