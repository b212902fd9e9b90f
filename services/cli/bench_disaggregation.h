// `deltamesh bench-disaggregation`: the router's choice between handing over and computing a prompt where
// it is decoded, against doing always the one or the other. Three local meshes that differ in nothing
// else take turns with the same three kinds of work:
//
//   documents  long prompts, nobody asks again
//   agents     conversations that append a little to long contexts
//   chats      short prompts
//
// All processes share this machine, so handing over brings no more compute; what it costs is measured.
// `deltamesh simulate --compare-disaggregation` has workers with machines of their own.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct DisaggregationBenchOptions {
  std::string model;  // checkpoint folder; empty: a small random one
  int threads = 2;    // of each worker
  int64_t document_tokens = 2048, agent_tokens = 2048, append_tokens = 100, chat_tokens = 96;
  int64_t answer_tokens = 16;
  int64_t clients = 2;  // at once
  int64_t turns = 3;    // of each client and kind in a round
  int rounds = 3;
  bool json = false;
};
void AddDisaggregationBenchFlags(CLI::App* app, DisaggregationBenchOptions* options);

// Call on the main thread.
absl::Status RunDisaggregationBench(const DisaggregationBenchOptions& options, std::ostream& out);

}  // namespace deltamesh
