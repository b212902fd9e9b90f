// `deltamesh bench-sessions`: what a turn costs that adds a little to a long prompt the mesh has seen, each
// figure with its bar. A whole local mesh takes turns with an engine in this process and with hand-offs.
//
//   the same prompt again   all but the last block of 64 tokens is restored
//   a turn of `append` more  takes no more than 1.2 times what an engine needs for the tokens that are not
//                           restored, behind the same context, and one hand-off of what they add
//
// Then a prefill worker fetches what a decode worker holds of the prompt (bench_fetch.h): how long that takes
// and how fast it is, and the first token of such a turn beside that of the same turn computed again.
//
// Attention reads the whole context for each new token, so the same tokens cost an engine more behind a long
// context than from an empty one. Both are reported, and the turn is judged by the former.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct SessionBenchOptions {
  std::string model;  // checkpoint folder; empty: a small random one
  int threads = 2;
  std::string weights = "stored", activations = "float", packed_dir = "auto";
  int64_t context = 32768;     // tokens of the long prompt
  int64_t append = 700;        // that a turn adds
  int64_t chunk_tokens = 512;  // of the engine in this process
  int repetitions = 5;
  bool json = false;
};
void AddSessionBenchFlags(CLI::App* app, SessionBenchOptions* options);

// Call on the main thread.
absl::Status RunSessionBench(const SessionBenchOptions& options, std::ostream& out);

}  // namespace deltamesh
