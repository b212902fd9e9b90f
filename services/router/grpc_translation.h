// What every handler of gRPC calls says in gRPC's words.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "runtime/base/safe_message.h"
#include "services/common/grpc_call.h"
#include "services/common/retry_hint.h"

namespace deltamesh {

inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), SafeMessage(status));
}

// For clients that are to come again: where that helps the status says when.
inline GrpcCall::Metadata RetryHint(const absl::Status& status) {
  const std::optional<absl::Duration> after = RetryAfterOf(status);
  if (!after) return {};
  return {{kRetryAfterMs, std::to_string(absl::ToInt64Milliseconds(*after))},
          {kRetryAfter, std::to_string(RetrySeconds(*after))}};
}

// The one way in which calls end with an error, so that none lacks the hint.
inline void Refuse(GrpcCall& call, const absl::Status& status) {
  call.Finish(ToGrpc(status), RetryHint(status));
}

inline absl::Time DeadlineOf(const GrpcCall& call) {
  // A call without a deadline has the largest time point, which no arithmetic survives.
  const auto deadline = call.deadline();
  if (deadline > std::chrono::system_clock::now() + std::chrono::hours(24 * 365)) {
    return absl::InfiniteFuture();
  }
  return absl::FromChrono(deadline);
}

}  // namespace deltamesh
