// What every role answers over HTTP: /healthz (the process lives), /readyz (it can do its work) and
// /metrics. Anything else goes to `next`, or is 404 without one.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "services/common/http_server.h"
#include "services/common/metrics.h"

namespace deltamesh {

// Thread-safe as far as `ready` and `next` are.
class HttpOps final : public HttpHandler {
 public:
  // `ready` says why not; `refresh` (optional) runs before each exposition to bring gauges up to
  // date.
  HttpOps(Metrics* metrics, std::function<absl::Status()> ready, std::function<void()> refresh = {},
          HttpHandler* next = nullptr);
  void Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) override;
  HttpResponse Refusal(int status, std::string why, std::string_view target) override;

 private:
  Metrics* const metrics_;
  const std::function<absl::Status()> ready_;
  const std::function<void()> refresh_;
  HttpHandler* const next_;
};

}  // namespace deltamesh
