// deltamesh.v1.Operations over gRPC: what operators ask a router.
//
// Thread-safe.
#pragma once

#include "deltamesh/v1/operations.grpc.pb.h"
#include "services/router/router_server.h"

namespace deltamesh {

class OperationsService final : public v1::Operations::CallbackService {
 public:
  static constexpr uint32_t kLastMax = 256;

  // Must outlive the gRPC server that serves this.
  explicit OperationsService(RouterServer* router) : router_(router) {}

  grpc::ServerUnaryReactor* Explain(grpc::CallbackServerContext* context,
                                    const v1::ExplainRequest* request,
                                    v1::ExplainResponse* response) override;

 private:
  RouterServer* const router_;
};

void FillExplanation(const Decision& decision, v1::RequestExplanation* out);

}  // namespace deltamesh
