// What the routed experts of a traffic cost: multiplications, weights read, rows over links.
//
// In every MoE layer a token's row goes once to each shard that hosts one of its experts, and one row comes
// back for each of its experts (runtime/expert): rows that come back decide about links. A step
// of an attention worker is one call to each shard and layer, and a shard computes calls one by one, so each
// step reads the weights of all experts that its tokens chose.
#pragma once

#include "services/plan/fleet.h"

namespace deltamesh {

double ExpertFlopsPerToken(const ModelShape& shape);
// Float rows that come back for a token, one for each of its experts, of the width in which experts live;
// fewer go out.
double ExpertRowBytesPerToken(const ModelShape& shape);
// Weights of the experts that `tokens` tokens choose in all layers, each as if by chance.
double ExpertBytesOfStep(const ModelShape& shape, double tokens);

// `prefill` and `decode` are those of `fleet` already; fills in the rest about experts.
absl::Status PlanExperts(const ModelShape& shape, const WorkerMachine& machine,
                         const PlannedTraffic& traffic, Fleet* fleet);

}  // namespace deltamesh
