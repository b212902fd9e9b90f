// The client of `bench-router` that asks for a completion over HTTP.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace deltamesh {

// Streams an answer of `answer_tokens` to a prompt of so many tokens; `i` makes it another prompt. A
// connection of its own.
absl::Status StreamOverHttp(const std::string& address, int64_t prompt_tokens,
                            int64_t answer_tokens, int64_t i);

}  // namespace deltamesh
