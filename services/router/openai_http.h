// The OpenAI-compatible HTTP endpoints: /v1/chat/completions, /v1/completions, /v1/models.
//
// Thread-safe.
#pragma once

#include <memory>

#include "services/common/http_server.h"
#include "services/router/front.h"
#include "services/router/openai_request.h"
#include "services/router/router_server.h"

namespace deltamesh {

class OpenAiHttp final : public HttpHandler {
 public:
  // Both must outlive the HTTP server that calls this.
  OpenAiHttp(const Front* front, RouterServer* router) : front_(front), router_(router) {}
  void Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) override;

 private:
  void Complete(const HttpRequest& request, bool chat, std::shared_ptr<HttpResponder> responder);
  void Models(const std::string& name, HttpResponder* responder) const;

  const Front* const front_;
  RouterServer* const router_;
};

}  // namespace deltamesh
