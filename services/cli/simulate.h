// `deltamesh simulate`: the mesh's policies under traffic, with virtual workers and time.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "services/simulate/simulation.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct SimulateOptions {
  SimulationOptions simulation;
  std::string latents = "bf16", state = "f32", conv = "bf16";
  double cache_gb = 0, link_gb = 50, step_ms = 20, token_ms = 0.3;
  bool compare = false;  // ways of disaggregation instead
  double scale = 1;      // of that
  bool json = false;
};

void AddSimulateFlags(CLI::App* app, SimulateOptions* options);
// How fast it went is told on `log`, which is no part of the report.
absl::Status RunSimulate(const SimulateOptions& options, std::ostream& out, std::ostream& log);

}  // namespace deltamesh
