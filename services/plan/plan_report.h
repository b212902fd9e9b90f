// What `deltamesh plan` says about a model: one struct of questions, one document of answers.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/plan/fleet.h"
#include "services/plan/sizes.h"

namespace deltamesh {

inline constexpr int64_t kKvHeadsMax = 65536;

struct PlanQuestions {
  CacheWidths widths;
  VariantOptions variants;
  std::vector<int64_t> lengths = {8192, 32768, 131072, 1048576};  // tokens
  int64_t append_tokens = 705;  // of a turn whose earlier prompt the receiver has
  WorkerMachine machine;        // memory 0: sessions and workers are not asked for
  PlannedTraffic traffic;       // requests 0: workers are not asked for
  RouterCost router;
};

// Numbers without units in their names are bytes.
absl::StatusOr<nlohmann::ordered_json> PlanDocument(const ModelShape& shape,
                                                    const PlanQuestions& questions);
// The same for people.
void PrintPlan(const nlohmann::ordered_json& document, std::ostream& out);

}  // namespace deltamesh
