#include "runtime/transfer/transport.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {

absl::StatusOr<Landing> FittingLanding(Landing landing, int64_t payload_bytes) {
  if (static_cast<int64_t>(landing.buffer.size()) == payload_bytes) return landing;
  absl::Status status = Internal("a handler gave %d bytes for a payload of %d; it is dropped",
                                 landing.buffer.size(), payload_bytes);
  LogError("transport.wrong_landing", {{"error", MessageOf(status)}});
  if (landing.done) landing.done(status);
  return status;
}

}  // namespace deltamesh
