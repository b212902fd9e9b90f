// Messages as they may cross a process boundary: well-formed UTF-8, of a bounded length, never empty.
// A protobuf string refuses other bytes, so one odd byte in a reason would lose the whole message.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace deltamesh {

inline constexpr size_t kMessageBytesMax = 1 << 10;

// `message` with U+FFFD for each byte that is no part of a well-formed character, cut after the last
// character that ends within `max` bytes.
std::string SafeMessage(std::string_view message, size_t max = kMessageBytesMax);

// The message of `status`, or the name of its code when it has none.
std::string SafeMessage(const absl::Status& status, size_t max = kMessageBytesMax);

}  // namespace deltamesh
