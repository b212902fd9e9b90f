#include "runtime/transfer/transport.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {

absl::StatusOr<PayloadTarget> FittingTarget(PayloadTarget target, int64_t payload_bytes) {
  if (static_cast<int64_t>(target.buffer.size()) == payload_bytes) return target;
  absl::Status status = Internal("a handler gave %d bytes for a payload of %d; it is dropped",
                                 target.buffer.size(), payload_bytes);
  LogError("transport.wrong_target", {{"error", MessageOf(status)}});
  if (target.done) target.done(status);
  return status;
}

}  // namespace deltamesh
