// What can be told about the stores of a prefill or decode worker before its model is read: a large model
// takes minutes, and a wrong word should not wait for it.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "services/worker/attention_worker.h"

namespace deltamesh {

// The value of a variable of the environment; empty when it is not set.
using EnvironmentReader = std::function<std::string(const char*)>;
std::string ReadEnvironment(const char* name);

// Of those with stores, whose sessions are waited for under their name. Before FinishWorkerFlags, which makes
// up a name that no other process has.
absl::Status CheckStoreName(const AttentionFlags& flags);

// Of those with stores, after FinishWorkerFlags. Makes the store's folder when it is not there.
absl::Status CheckStores(const AttentionFlags& flags, const EnvironmentReader& environment);

}  // namespace deltamesh
