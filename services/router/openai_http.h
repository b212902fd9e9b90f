// The OpenAI-compatible HTTP endpoints: /v1/chat/completions, /v1/completions, /v1/models.
//
// Thread-safe.
#pragma once

#include <memory>

#include "services/common/http_server.h"
#include "services/router/encode_pool.h"
#include "services/router/front.h"
#include "services/router/openai_request.h"
#include "services/router/router_server.h"

namespace deltamesh {

class OpenAiHttp final : public HttpHandler {
 public:
  // All must outlive the HTTP server that calls this.
  OpenAiHttp(const Front* front, RouterServer* router, EncodePool* pool)
      : front_(front), router_(router), pool_(pool) {}
  void Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) override;
  // In the shape of this API for paths below /v1.
  HttpResponse Refusal(int status, std::string why, std::string_view target) override;

 private:
  // A request for a completion, as it is called from its arrival on.
  struct Origin {
    RequestId id;
    TraceContext trace;
  };
  Origin OriginOf(const HttpRequest& request) const;
  // Large bodies go through the pool; the answer comes later then.
  void Accept(HttpRequest request, bool chat, std::shared_ptr<HttpResponder> responder);
  void Complete(const HttpRequest& request, const Origin& origin, bool chat,
                std::shared_ptr<HttpResponder> responder);
  // Before the router was asked; it is told.
  void Refuse(const Origin& origin, const absl::Status& status, HttpResponder* responder) const;
  void Models(const std::string& name, HttpResponder* responder) const;

  const Front* const front_;
  RouterServer* const router_;
  EncodePool* const pool_;
};

}  // namespace deltamesh
