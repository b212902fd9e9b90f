// What two processes must agree on to mean the same text by the same token ids.
#pragma once

#include <filesystem>
#include <string>

#include "absl/status/statusor.h"

namespace deltamesh {

// Hex SHA-256 over the files of a checkpoint folder that turn text into tokens and back: config.json,
// tiktoken.model, tokenizer_config.json, generation_config.json and chat_literals.json, byte for byte;
// a missing one differs from an empty one. NOT_FOUND when the folder has no config.json.
absl::StatusOr<std::string> TextDigest(const std::filesystem::path& folder);

}  // namespace deltamesh
