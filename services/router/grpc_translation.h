// What every handler of gRPC calls says in gRPC's words.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "runtime/base/safe_message.h"
#include "services/common/grpc_call.h"

namespace deltamesh {

inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), SafeMessage(status));
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
