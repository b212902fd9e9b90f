#include "services/common/http_wire.h"

#include <algorithm>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/write.hpp>
#include <cctype>
#include <sstream>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

namespace http = boost::beast::http;

namespace {

// Splits the target; false when it is neither a path nor an absolute address.
bool SplitTarget(std::string_view target, HttpRequest* out) {
  if (const size_t scheme = target.find("://");
      scheme != target.npos && scheme < target.find('/')) {
    const size_t path = target.find('/', scheme + 3);
    target = path == target.npos ? std::string_view("/") : target.substr(path);
  }
  if (target.empty() || target[0] != '/') return false;
  const size_t mark = target.find('?');
  out->path = target.substr(0, mark);
  if (mark != target.npos) out->query = target.substr(mark + 1);
  return true;
}

}  // namespace

std::string_view HttpRequest::Header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return {};
}

HttpResponse HttpHandler::Refusal(int status, std::string why, std::string_view) {
  return PlainError(status, std::move(why));
}

std::optional<HttpRefusal> RequestFromWire(HttpMessage message, HttpRequest* out) {
  out->method = std::string(message.method_string());
  if (message.method() == http::verb::unknown) {
    return HttpRefusal{501, "method " + out->method + " is not served"};
  }
  if (message.method() == http::verb::head) out->method = "GET";
  for (const auto& field : message) {
    std::string name(field.name_string());
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    out->headers.emplace_back(std::move(name), std::string(field.value()));
  }
  // OPTIONS may ask about the whole server.
  const bool whole = message.method() == http::verb::options && message.target() == "*";
  if (!whole && !SplitTarget(std::string_view(message.target()), out)) {
    return HttpRefusal{400, "the target is not a path"};
  }
  if (message.version() >= 11 && out->Header("host").empty()) {
    return HttpRefusal{400, "no Host header"};
  }
  if (message.count(http::field::host) > 1) return HttpRefusal{400, "several Host headers"};
  // What frames a body in a way that others read differently would smuggle a request past them.
  const auto coding = message.find(http::field::transfer_encoding);
  const bool framed =
      coding == message.end() || (message.count(http::field::transfer_encoding) == 1 &&
                                  boost::beast::iequals(coding->value(), "chunked"));
  if (!framed) return HttpRefusal{400, "Transfer-Encoding is other than chunked"};
  out->body = std::move(message.body());
  return std::nullopt;
}

std::optional<HttpRefusal> RefusalOfReadError(const boost::system::error_code& error,
                                              const HttpOptions& options) {
  if (error == http::error::body_limit) {
    return HttpRefusal{413,
                       absl::StrFormat("the body is larger than %d bytes", options.body_bytes_max)};
  }
  if (error == http::error::header_limit) {
    return HttpRefusal{
        431, absl::StrFormat("the header is larger than %d bytes", options.header_bytes_max)};
  }
  // A half-closed connection ends no request (RFC 9112, 6.3): what is not whole then never will be.
  const bool ended = error == http::error::end_of_stream || error == http::error::partial_message;
  if (ended || error.category() != http::make_error_code(http::error::bad_method).category()) {
    return std::nullopt;
  }
  return HttpRefusal{400, "not HTTP/1.1: " + error.message()};
}

std::string ResponseHead(const HttpResponse& response, unsigned version, bool keep_alive,
                         HttpFraming framing) {
  http::response<http::empty_body> message(static_cast<http::status>(response.status), version);
  message.set(http::field::server, "deltamesh");
  if (!response.content_type.empty()) message.set(http::field::content_type, response.content_type);
  for (const auto& [name, value] : response.headers) message.set(name, value);
  message.keep_alive(keep_alive && version >= 11);
  if (framing == HttpFraming::kChunks) message.chunked(true);
  // 204 has no body, not even an empty one.
  if (framing == HttpFraming::kLength && response.status != 204) {
    message.content_length(response.body.size());
  }
  std::ostringstream out;
  out << message.base();
  return std::move(out).str();
}

std::string ChunkOnWire(std::string_view bytes) {
  std::string out = absl::StrFormat("%x\r\n", bytes.size());
  out.append(bytes).append("\r\n");
  return out;
}

HttpResponse PlainError(int status, std::string message) {
  return {.status = status,
          .content_type = "text/plain; charset=utf-8",
          .headers = {},
          .body = std::move(message) + "\n"};
}

}  // namespace deltamesh
