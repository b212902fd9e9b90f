#include "services/common/http_ops.h"

#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

HttpOps::HttpOps(Metrics* metrics, std::function<absl::Status()> ready,
                 std::function<void()> refresh, HttpHandler* next)
    : metrics_(metrics), ready_(std::move(ready)), refresh_(std::move(refresh)), next_(next) {}

namespace {

HttpResponse Text(int status, std::string body) {
  return {.status = status,
          .content_type = "text/plain; charset=utf-8",
          .headers = {},
          .body = std::move(body)};
}

}  // namespace

void HttpOps::Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) {
  const bool known =
      request.path == "/healthz" || request.path == "/readyz" || request.path == "/metrics";
  if (!known && next_ != nullptr) return next_->Handle(std::move(request), std::move(responder));
  if (!known) {
    return responder->Send(
        Text(404, request.path + " is not served here; try /healthz, /readyz or /metrics\n"));
  }
  if (request.method != "GET") {
    HttpResponse response = Text(405, request.path + " answers GET only\n");
    response.headers = {{"Allow", "GET, HEAD"}};
    return responder->Send(std::move(response));
  }
  if (request.path == "/healthz") return responder->Send(Text(200, "ok\n"));
  if (request.path == "/readyz") {
    const absl::Status status = ready_();
    return responder->Send(status.ok() ? Text(200, "ok\n") : Text(503, MessageOf(status) + "\n"));
  }
  if (refresh_) refresh_();
  HttpResponse response = Text(200, metrics_->Expose());
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  responder->Send(std::move(response));
}

HttpResponse HttpOps::Refusal(int status, std::string why, std::string_view target) {
  if (next_ != nullptr) return next_->Refusal(status, std::move(why), target);
  return HttpHandler::Refusal(status, std::move(why), target);
}

}  // namespace deltamesh
