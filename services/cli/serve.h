// `deltamesh serve`: the whole mesh on this machine, each role its own process, on loopback.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct ServeOptions {
  std::string model;  // checkpoint folder; empty: the one that comes with deltamesh
  int prefill = 1, decode = 1,
      experts = 2;                    // processes; no expert shard for a model without experts
  std::string weights = "stored";     // width of matrices: stored or 8bit
  std::string activations = "float";  // inputs of narrow matrices: float or int8
  std::string packed_dir = "auto";  // where the workers share packed weights: auto, off or a folder
  double packed_max_gib = 64;       // see WorkerFlags
  int threads = 0;                  // of each worker's step loop; 0: one per processor
  std::string host = "127.0.0.1";
  int grpc_port = 8081, http_port = 8080;  // of the router; 0: any free one
  // Passed on when given, "--slabs=8": to prefill and decode workers, and to the router.
  std::vector<std::string> worker_flags, router_flags;
  // The workers' flags of the same names, passed on when given.
  std::string store_dir, store_gib, store_after_seconds, store_s3, store_s3_gib;
  std::string model_name;    // as clients name it; empty: the folder's name
  std::string first_answer;  // streams an answer to this once ready; empty: none
  int64_t first_answer_tokens = 48;
  std::string run_dir;  // logs and port files; empty: a temporary folder
  bool keep_run_dir = false;
  double ready_seconds = 600;  // longest wait for all processes
  int64_t parent = 0;          // end when this process dies; 0: never
};
void AddServeFlags(CLI::App* app, ServeOptions* options);

// Returns the exit code: 0 after SIGINT or SIGTERM, 1 when something could not start or died. Call on the
// main thread before any other thread exists. Leaves no process and no file behind.
int RunServe(ServeOptions options);

}  // namespace deltamesh
