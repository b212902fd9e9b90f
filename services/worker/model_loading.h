// Opening what a worker needs before it has a core: the transport and the weights.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/model/model.h"
#include "runtime/transfer/transport.h"
#include "services/common/flags.h"

namespace deltamesh {

// A UCX transport as the flags say. UCX reads its settings from the environment, which this sets: call it
// before other threads exist.
absl::StatusOr<std::unique_ptr<Transport>> OpenUcx(const WorkerFlags& flags);

// Loads with lines of progress on stderr.
absl::StatusOr<std::unique_ptr<Model>> LoadModel(const WorkerFlags& flags,
                                                 const ExpertSelection& experts, bool only_experts);

// The flags every worker has, for the configuration printed at start.
std::vector<std::pair<std::string, std::string>> DescribeWorker(const WorkerFlags& flags);

}  // namespace deltamesh
