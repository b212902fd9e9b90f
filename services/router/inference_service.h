// deltamesh.v1.Inference over gRPC: translates calls to the front and the router, and answers to events.
//
// Thread-safe.
#pragma once

#include "deltamesh/v1/inference.grpc.pb.h"
#include "services/router/encode_pool.h"
#include "services/router/front.h"
#include "services/router/router_server.h"

namespace deltamesh {

class InferenceService final : public v1::Inference::CallbackService {
 public:
  // Events a slow client may leave unread before its call is ended.
  static constexpr size_t kUnreadEventsMax = 8192;

  // All must outlive the gRPC server that serves this.
  InferenceService(const Front* front, RouterServer* router, EncodePool* pool)
      : front_(front), router_(router), pool_(pool) {}

  grpc::ServerWriteReactor<v1::GenerateEvent>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* CountTokens(grpc::CallbackServerContext* context,
                                        const v1::TokenizeRequest* request,
                                        v1::CountTokensResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;

  // inference_sessions.cc
  grpc::ServerUnaryReactor* GetSession(grpc::CallbackServerContext* context,
                                       const v1::GetSessionRequest* request,
                                       v1::SessionInfo* response) override;
  grpc::ServerUnaryReactor* SuspendSession(grpc::CallbackServerContext* context,
                                           const v1::SuspendSessionRequest* request,
                                           v1::SuspendSessionResponse* response) override;
  grpc::ServerUnaryReactor* ResumeSession(grpc::CallbackServerContext* context,
                                          const v1::ResumeSessionRequest* request,
                                          v1::ResumeSessionResponse* response) override;
  grpc::ServerUnaryReactor* ForkSession(grpc::CallbackServerContext* context,
                                        const v1::ForkSessionRequest* request,
                                        v1::ForkSessionResponse* response) override;

 private:
  absl::StatusOr<std::vector<TokenId>> TokensOf(const v1::TokenizeRequest& request) const;
  // Tokenises here or on the pool, hands the result to `fill`, then ends the call.
  void Encode(const v1::TokenizeRequest* request, grpc::ServerUnaryReactor* reactor,
              std::function<void(const std::vector<TokenId>&)> fill) const;

  const Front* const front_;
  RouterServer* const router_;
  EncodePool* const pool_;
};

// The model as clients see it now.
v1::ModelInfo CurrentModelInfo(const Front& front, const RouterServer& router);

}  // namespace deltamesh
