#include "runtime/transfer/transport.h"

#include <cstring>
#include <utility>

#include "runtime/base/crc32c.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/base/stream_copy.h"

namespace deltamesh {

absl::StatusOr<PayloadTarget> FittingTarget(PayloadTarget target, int64_t payload_bytes) {
  if (static_cast<int64_t>(target.buffer.size()) == payload_bytes) return target;
  absl::Status status = Internal("a handler gave %d bytes for a payload of %d; it is dropped",
                                 target.buffer.size(), payload_bytes);
  LogError("transport.wrong_target", {{"error", MessageOf(status)}});
  if (target.done) target.done(status);
  return status;
}

absl::Status CheckPayload(const PayloadTarget& target, std::span<const std::byte> payload) {
  if (!target.crc32c.has_value()) return absl::OkStatus();
  const uint32_t crc = Crc32c(payload);
  if (crc == *target.crc32c) return absl::OkStatus();
  return DataLoss("a payload of %d bytes has the checksum %08x; %08x was announced", payload.size(),
                  crc, *target.crc32c);
}

// The checksum first: copying leaves less of the payload in the caches than summing does.
absl::Status LandPayload(const PayloadTarget& target, std::span<const std::byte> payload) {
  RETURN_IF_ERROR(CheckPayload(target, payload));
  if (target.cold) {
    StreamCopy(target.buffer, payload);
  } else {
    std::memcpy(target.buffer.data(), payload.data(), payload.size());
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
