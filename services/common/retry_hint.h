// When a refused client should come again, carried by the status that refuses it: every door the client may
// have come through then says it in its own way (gRPC trailing metadata, HTTP headers).
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace deltamesh {

// Names of the hints, in gRPC metadata and in HTTP headers.
inline constexpr char kRetryAfterMs[] = "retry-after-ms";
inline constexpr char kRetryAfter[] = "retry-after";  // whole seconds, rounded up

// Where what is missing comes by itself, soon.
inline constexpr absl::Duration kComeAgain = absl::Seconds(1);

// `after` is rounded up to a millisecond. OK stays OK.
absl::Status WithRetryAfter(absl::Status status, absl::Duration after);
// Nothing when the status has none.
std::optional<absl::Duration> RetryAfterOf(const absl::Status& status);

// Whole seconds that are not shorter than `after`, at least 1.
int64_t RetrySeconds(absl::Duration after);

}  // namespace deltamesh
