// `deltamesh bench`: speed of one engine on this machine, each figure with its fraction of the ceiling.
//
// Token ids are a fixed hash of (sequence, position), so any engine can be fed the same. Prefill times the
// logits of the last position; decode times one step per given id, without sampling. The median of the
// repetitions is reported.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace deltamesh {

struct BenchOptions {
  std::string model;  // checkpoint folder
  int threads = 2;
  std::string weights = "stored";           // width of matrices: stored or 8bit
  std::string packed_dir = "auto";          // see PackedFolder
  std::vector<int64_t> prefill = {512};     // prompt lengths
  std::vector<int64_t> depths = {0};        // contexts for decoding one sequence
  std::vector<int64_t> sequences = {4, 8};  // batch sizes for decoding from an empty context
  int64_t decode_steps = 64;
  int64_t chunk_tokens = 512;
  int repetitions = 3;
  bool roofline = true;  // probe the machine first
  bool json = false;     // JSON instead of the table
  std::string label;     // free text for the JSON
};

absl::Status RunBench(const BenchOptions& options, std::ostream& out);

}  // namespace deltamesh
