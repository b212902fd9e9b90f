// One streamed answer on the terminal, to see that a mesh works.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace deltamesh {

// Sends `text` as a user message over gRPC, without a thinking block, and writes the answer to `out` as it
// arrives, then a line of figures. `stop` is asked now and then; true cancels the call.
absl::Status StreamFirstAnswer(const std::string& router, const std::string& text,
                               int64_t max_tokens, std::ostream& out,
                               const std::function<bool()>& stop);

// Whether the health service at `address` answers SERVING for "".
bool IsServing(const std::string& address);

}  // namespace deltamesh
