// `deltamesh bench --curve` and `--hybrid-vs-full`: what long contexts cost.
//
//   curve           one prompt, with the time per token where it passes each of the given lengths: all
//                   layers, and KDA layers alone; within a bound on the memory of the process
//   hybrid-vs-full  the same small shape with 3 KDA layers to 1 MLA layer against MLA in every layer:
//                   bytes of cache and time of a decode step behind each of the given contexts
//
// Models are random and small, written to a temporary folder, unless `model` names one for the curve.
// Contexts of hybrid-vs-full are filled, not computed: behind a short one both ways are timed and printed.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/cli/long_run.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct CurveOptions {
  std::string model;                 // empty: a random one
  std::vector<std::string> lengths;  // ascending: 1k,16k,128k,1M
  LongRunOptions run;
  int64_t chunk_tokens = 512;
  // Fill the cache up to the tokens that are timed instead of computing the prompt: seconds, not minutes.
  bool fill = false;
  int64_t memory_mib = 1024;  // RESOURCE_EXHAUSTED when the process ever held more
  bool json = false;
};
// `notes` gets a line as soon as a length is reached: a long prompt takes minutes.
absl::Status RunCurve(const CurveOptions& options, std::ostream& out, std::ostream& notes);

struct HybridOptions {
  std::vector<std::string> contexts = {"128k", "1M"};
  LongRunOptions run;
  int64_t decode_steps = 8;  // timed in turns; the median counts
  bool json = false;
};
absl::Status RunHybridVsFull(HybridOptions options, std::ostream& out);

// Those of their options that no other benchmark has, and the flag `compare` that asks for the second.
void AddLongFlags(CLI::App* app, CurveOptions* curve, bool* compare, HybridOptions* hybrid);

}  // namespace deltamesh
