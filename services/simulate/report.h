// What `deltamesh simulate` says: one document, and the same as a table. Holds nothing of the machine it ran
// on, so that the same run gives the same bytes.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "services/simulate/cache_run.h"
#include "services/simulate/mesh_run.h"

namespace deltamesh {

// Numbers without units in their names are counts; shares are of 1.
nlohmann::ordered_json CacheRow(const std::string& policy, const CacheRunResult& result,
                                const std::optional<CacheRunResult>& bound);
void PrintCacheRows(const nlohmann::ordered_json& rows, std::ostream& out);

// `bound_hit_rate`: of one cache as large as all of them, with states for free.
nlohmann::ordered_json MeshRow(const std::string& policy, std::string_view disaggregation,
                               const MeshRunResult& result, std::optional<double> bound_hit_rate);
// One entry for each status code: its name, how many, and the first one's words.
nlohmann::ordered_json FailuresJson(const std::map<absl::StatusCode, MeshFailures>& failures);
// Null where no request came so far: a percentile of nothing is no number.
nlohmann::ordered_json LatencyJson(const Latency& latency);
// Seconds of it for people, "-" for null.
std::string TimeText(const nlohmann::ordered_json& seconds);
void PrintMeshRows(const nlohmann::ordered_json& rows, std::ostream& out);

}  // namespace deltamesh
