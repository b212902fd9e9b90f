// deltamesh.v1.Operations over gRPC: what operators ask a router.
//
// Thread-safe.
#pragma once

#include <memory>
#include <string_view>

#include "deltamesh/v1/operations.pb.h"
#include "services/common/grpc_call.h"
#include "services/router/router_server.h"

namespace deltamesh {

class OperationsService final : public GrpcService {
 public:
  static constexpr uint32_t kLastMax = 256;

  // Must outlive the gRPC server that serves this.
  explicit OperationsService(RouterServer* router) : router_(router) {}

  std::string_view name() const override;
  std::shared_ptr<GrpcCall::Events> Take(std::string_view method,
                                         const std::shared_ptr<GrpcCall>& call) override;

 private:
  RouterServer* const router_;
};

void FillExplanation(const Decision& decision, v1::RequestExplanation* out);

}  // namespace deltamesh
