// The text files of a checkpoint whose ordinary tokens are the 256 bytes, for random models.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/cli/random_model.h"

namespace deltamesh {

inline constexpr int64_t kByteTextVocab = 512;  // at least: the bytes and the reserved ids

// Beside a config.json of the published layout of Kimi-Linear with kByteTextVocab ids or more.
absl::Status WriteByteText(const std::string& folder);

// `named`, or where that is empty a small random model with such text, which goes with `scratch`.
absl::StatusOr<std::string> NamedOrRandomModel(const std::string& named,
                                               std::unique_ptr<ScratchFolder>* scratch);

}  // namespace deltamesh
