// deltamesh.v1.Inference over gRPC: translates calls to the front and the router, and answers to events.
//
// Thread-safe. Requests are parsed, rendered and tokenised on the gRPC server's thread when they are small,
// and in the pool when they are not: that thread carries the answers of all others.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "deltamesh/v1/inference.pb.h"
#include "services/common/grpc_call.h"
#include "services/router/encode_pool.h"
#include "services/router/front.h"
#include "services/router/router_server.h"

namespace deltamesh {

class InferenceService final : public GrpcService {
 public:
  // Events a slow client may leave unread before its call is ended.
  static constexpr size_t kUnreadEventsMax = 8192;

  // All must outlive the gRPC server that serves this.
  InferenceService(const Front* front, RouterServer* router, EncodePool* pool)
      : front_(front), router_(router), pool_(pool) {}

  std::string_view name() const override;
  std::shared_ptr<GrpcCall::Events> Take(std::string_view method,
                                         const std::shared_ptr<GrpcCall>& call) override;

 private:
  using Call = std::shared_ptr<GrpcCall>;
  // Tokenises here or on the pool, then answers.
  std::shared_ptr<GrpcCall::Events> TakeTokenize(const Call& call, bool count_only) const;
  void Encode(const Call& call, const grpc::ByteBuffer& bytes, bool count_only) const;
  absl::StatusOr<std::vector<TokenId>> TokensOf(const grpc::ByteBuffer& bytes) const;
  // inference_sessions.cc; null when it is no method of sessions.
  std::shared_ptr<GrpcCall::Events> TakeSession(std::string_view method, const Call& call) const;

  const Front* const front_;
  RouterServer* const router_;
  EncodePool* const pool_;
};

// The model as clients see it now.
v1::ModelInfo CurrentModelInfo(const Front& front, const RouterServer& router);

}  // namespace deltamesh
