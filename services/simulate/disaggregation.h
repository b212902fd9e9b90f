// Whether the planner's choice, request by request, is at least as good as handing over always or never: the
// same traffic through the same virtual workers, three times.
//
// Three kinds of traffic, each light and busy, over fast and over slow links:
//   unique   long documents that nobody asks about again
//   agents   sessions that append a little to long contexts
//   chats    short prompts and a few turns
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "services/simulate/simulation.h"

namespace deltamesh {

struct DisaggregationOptions {
  SimulationOptions
      base;          // model, seed, rates, workers, cache; traffic and link are those of the cases
  double scale = 1;  // of how long each traffic lasts
};

using DisaggregationProgress = std::function<void(const std::string& what, int64_t requests)>;
// The planner loses when its four figures (first token and whole answer, mean and 90th percentile) are
// together, by the geometric mean of their ratios, more than this above another way's. Runs that place all
// but a few of thousands of requests alike differ by as much as 0.013.
inline constexpr double kDisaggregationSlack = 0.02;
absl::StatusOr<nlohmann::ordered_json> CompareDisaggregation(
    const DisaggregationOptions& options, const DisaggregationProgress& progress);
void PrintDisaggregation(const nlohmann::ordered_json& document, std::ostream& out);

}  // namespace deltamesh
