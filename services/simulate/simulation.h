// What `deltamesh simulate` runs: one traffic, as often as there are policies, each time from its seed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/plan/fleet.h"
#include "services/plan/sizes.h"
#include "services/simulate/mesh_run.h"
#include "services/simulate/traffic.h"

namespace deltamesh {

// What each number may be, in units of its flag.
inline constexpr int64_t kSessionsMax = 10'000'000, kDocumentRequestsMax = 1'000'000'000;
inline constexpr int64_t kVirtualWorkersMax = 10'000, kSequencesMax = 1024;
inline constexpr NumberRange kHoursRange = {"hours", 1e-3, 8784, "hours, at most a year"};
inline constexpr NumberRange kCacheRange = {"cache", 0, 1e9, "GB; 0 for no bound"};
inline constexpr NumberRange kPromptRateRange = {"prompt-rate", 1, 1e9, "tokens per second"};
inline constexpr NumberRange kStepRange = {"step-ms", 1e-3, 1e6, "milliseconds"};
inline constexpr NumberRange kTokenRange = {"token-ms", 0, 1e5, "milliseconds"};
inline constexpr NumberRange kScaleRange = {"scale", 1e-3, 1000, "of the usual time"};

struct SimulationOptions {
  std::string config;  // of the model; empty: Kimi K3
  CacheWidths widths = {.latent = 2, .state = 4, .conv = 2};
  std::string traffic = "agents";  // "agents", "documents", "unique", "chats" or a trace file
  uint64_t seed = 1;
  int64_t sessions = 710;   // of agents
  int64_t requests = 4000;  // about documents, shared or unique
  int64_t chats = 4000;
  double hours = 24;                                // over which sessions begin, or requests come
  std::vector<std::string> policies;                // empty: those of the measured table
  int64_t prefill_workers = 0, decode_workers = 0;  // both 0: one cache, no queue
  std::vector<std::string> disaggregation = {
      "planned"};  // of a mesh: each in turn, see Disaggregation
  WorkerRates rates;
  double link_bytes_per_second = 50e9;
  int64_t slabs = 64;
  double cache_bytes = 0;  // of a worker; 0: without end
};

absl::StatusOr<std::unique_ptr<Traffic>> MakeTraffic(const SimulationOptions& options);
absl::StatusOr<CacheBytes> CacheBytesOf(const SimulationOptions& options);
// Rates, sizes and bounds that a mesh can have; of traffic only what is a number.
absl::Status CheckSimulation(const SimulationOptions& options);
MeshRunOptions MeshOf(const SimulationOptions& options, const CachePolicy& policy,
                      const CacheBytes& bytes);

// `progress` hears of each policy when it is done, with its requests; may be empty.
using SimulationProgress = std::function<void(const std::string& policy, int64_t requests)>;
absl::StatusOr<nlohmann::ordered_json> Simulate(const SimulationOptions& options,
                                                const SimulationProgress& progress);
void PrintSimulation(const nlohmann::ordered_json& document, std::ostream& out);

}  // namespace deltamesh
