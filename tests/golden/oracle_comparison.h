// The engine's run of a checkpoint against the oracle's.
#pragma once

#include <string>

#include "tests/golden/model_runner.h"

namespace deltamesh {

// Feeds `tokens` to the model in `folder` as `feed` says (logits.h) and expects the logits and states of the
// float64 oracle; files go into `scratch`. `more`: further flags of `oracle_check.py compare`. Returns what
// that said.
std::string ExpectTheOracles(const std::string& folder, const Tokens& tokens,
                             const std::string& feed, const std::string& scratch,
                             const std::string& more = "");

}  // namespace deltamesh
