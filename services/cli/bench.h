// `deltamesh bench`: how fast this machine runs a model, each figure with its fraction of a ceiling that was
// measured right before and after it (the median of these ratios).
//
//   prefill  logits of the last position of a prompt       against the multiply-add peak (*)
//   decode   one step per given id, no sampling            against the read bandwidth
//   batch    the same for several sequences at once
//   context  the same for one sequence behind a long context
//   handoff  a state between two processes                 against what their connection carries
//   mesh     a whole local mesh, as a client sees it       against this engine, taking turns with it
//
// (*) With int8 activations what 8-bit and MXFP4 matrices take is counted at the peak of 8-bit products.
//
// Token ids are a fixed hash of (sequence, position), so any engine can be fed the same. The median of the
// repetitions is reported.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/cli/bench_handoff.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct BenchOptions {
  std::string model;  // checkpoint folder
  std::vector<std::string> sections = {"prefill", "decode", "batch", "context", "handoff", "mesh"};
  int threads = 2;
  std::string weights = "stored";              // width of matrices: stored or 8bit
  std::string activations = "float";           // inputs of narrow matrices: float or int8
  std::string packed_dir = "auto";             // see PackedFolder
  std::vector<int64_t> prefill = {512};        // prompt lengths, also through the mesh
  std::vector<int64_t> depths = {4096};        // contexts for decoding one sequence
  std::vector<int64_t> sequences = {4, 8};     // batch sizes for decoding from an empty context
  std::vector<int64_t> mesh_sequences = {1};   // streams decoded at once through the mesh
  std::vector<int64_t> mesh_experts = {0, 2};  // shards of a mesh; 0: experts in each worker
  int64_t decode_steps = 64;
  int64_t chunk_tokens = 512;
  int repetitions = 3;
  bool roofline = false;  // only the machine's ceilings
  double roofline_seconds =
      0.2;  // per probe of the machine and repetition; 0: no probes, no fractions
  HandoffBenchOptions handoff;
  bool json = false;  // JSON instead of the table
  std::string label;  // free text for the JSON
};
void AddBenchFlags(CLI::App* app, BenchOptions* options);

// Whether it writes to the system's temporary folder.
bool NeedsScratch(const BenchOptions& options);

// Call on the main thread. After an error too it prints the rows that were measured before.
absl::Status RunBench(BenchOptions options, std::ostream& out);

}  // namespace deltamesh
