// `deltamesh bench-router`: what a router costs, each figure with its bar.
//
//   lookup   a prompt of 100k tokens asked of a prefix index, this thread alone
//   changes  facts of workers applied to it, and its memory while they come and go
//   request  CPU of a real router process for a streamed answer, in front of a stand-in worker: of a request
//            that is alone, the strictest and the one the bar is for, and of one among several whose tokens
//            arrive together, as a worker's steps bring them; over gRPC, and over HTTP as most clients ask
//   intake   the part of it until the first token
//   idle     CPU of one with many registered workers and no request
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct RouterBenchOptions {
  std::string model;  // checkpoint folder; its text files are read
  int64_t index_blocks = 10'000'000;
  int64_t prompt_tokens = 100'000;
  int64_t answer_tokens = 1000;
  int64_t requests = 5;
  int64_t together = 8;  // requests at once
  int64_t idle_workers = 100;
  double idle_seconds = 5;
  double token_gap_ms = 1;  // between two tokens of the stand-in worker
  bool json = false;
};
void AddRouterBenchFlags(CLI::App* app, RouterBenchOptions* options);

struct RouterFigure {
  std::string name;
  double value = 0;
  double bar = 0;         // 0: none, a part of another figure
  bool at_least = false;  // the bar is a floor, else a ceiling
  std::string unit;

  bool met() const { return bar == 0 || (at_least ? value >= bar : value <= bar); }
};

// Without any process.
std::vector<RouterFigure> MeasureIndex(const RouterBenchOptions& options);
// With router processes of this very binary.
absl::StatusOr<std::vector<RouterFigure>> MeasureRouterProcess(const RouterBenchOptions& options);

// Call on the main thread.
absl::Status RunRouterBench(const RouterBenchOptions& options, std::ostream& out);

}  // namespace deltamesh
