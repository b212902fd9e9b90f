// What the routed experts of a traffic cost: multiplications, weights read, rows over links.
//
// A token's row goes to its experts of every MoE layer and comes back once for each (runtime/expert). A step
// of an attention worker is one call to each shard and layer, and a shard computes calls one by one, so each
// step reads the weights of all experts that its tokens chose.
#pragma once

#include "services/plan/fleet.h"

namespace deltamesh {

double ExpertFlopsPerToken(const ModelShape& shape);
// Float rows of the width in which experts live, one for each expert.
double ExpertRowBytesPerToken(const ModelShape& shape);
// Weights of the experts that `tokens` tokens choose in all layers, each as if by chance.
double ExpertBytesOfStep(const ModelShape& shape, double tokens);

// `prefill` and `decode` are those of `fleet` already; fills in the rest about experts.
absl::Status PlanExperts(const ModelShape& shape, const WorkerMachine& machine,
                         const PlannedTraffic& traffic, Fleet* fleet);

}  // namespace deltamesh
