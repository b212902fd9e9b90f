// The text files of a checkpoint whose ordinary tokens are the 256 bytes, for random models.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace deltamesh {

inline constexpr int64_t kByteTextVocab = 512;  // at least: the bytes and the reserved ids

// Beside a config.json of the published layout of Kimi-Linear with kByteTextVocab ids or more.
absl::Status WriteByteText(const std::string& folder);

}  // namespace deltamesh
