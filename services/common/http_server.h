// HTTP/1.1 on one port: small handlers in, whole answers or streamed chunks out. Knows nothing of
// what is served. Malformed HTTP is answered with 400, an unknown method with 501, a body or header
// over its bound with 413 or 431, a connection over the bound is closed with 503.
//
// When is a client gone? A reset or a failed write says so. The end of its sending side alone does not:
// a client may end it after its last request and still read (RFC 9112, 9.6), and one that closed the
// connection altogether looks the same until something is sent to it. So, once, the server sends a few
// bytes that mean nothing in that place: an interim response "100 Continue" before the status line, a
// leading zero of the next chunk's size after it. The system of a client that is gone answers with a
// reset, within a round trip; a client that is there gets its answer. Before HTTP/1.1 neither exists:
// there, the end of the sending side ends a request whose answer is still being made. A client that was
// cut off without a word is noticed by writes only, and so is one that left after it had sent more than
// 64 KiB before their turn: no more is read while an answer is made, so that connections_max times as much
// is all that lies here of requests whose turn has not come. The rest is read, and answered, in its turn.
//
// Threads: the server runs its own. Handle() is called on one of them and must not block: it
// answers through the responder, now or later, from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace deltamesh {

struct HttpRequest {
  std::string method;  // "GET", "POST"; HEAD arrives as GET, its body is not sent
  std::string path;    // before '?'
  std::string query;   // after '?', undecoded
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;

  // The first value of a header given in lower case; empty when absent.
  std::string_view Header(std::string_view name) const;
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  HttpHeaders headers;
  std::string body;
};

// The answer to one request. Thread-safe. Either Send once, or Begin, any number of Write, End.
// When the last reference goes before the answer is complete, the server answers 500 or cuts the
// stream.
class HttpResponder {
 public:
  virtual ~HttpResponder() = default;
  virtual void Send(HttpResponse response) = 0;
  // Status line and headers of a chunked answer; `body` of the response is ignored.
  virtual void Begin(HttpResponse head) = 0;
  // Queues one chunk. False when the client is gone or has left more than the bound unread: stop
  // producing.
  virtual bool Write(std::string chunk) = 0;
  virtual void End() = 0;
  // Called once, on a server thread, as soon as the client is gone before the answer was complete;
  // at once when it is gone already. Not called after a complete answer.
  virtual void OnGone(std::function<void()> gone) = 0;
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  virtual void Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) = 0;
  // The answer to input that never became a request: `status` and why, in words of the server.
  // `target` is what is known of the request's target, perhaps nothing. Plain text by default.
  virtual HttpResponse Refusal(int status, std::string why, std::string_view target);
};

struct HttpOptions {
  std::string address = "127.0.0.1";  // a name or an address, IPv6 without brackets
  int port = 0;                       // 0: any free one; see HttpServer::port()
  int threads = 2;
  int64_t connections_max = 4096;
  int64_t header_bytes_max = 32 << 10;
  int64_t body_bytes_max = 32 << 20;
  int64_t reading_bytes_max =
      512 << 20;                       // of bodies that have not wholly arrived, of all connections
  int64_t unread_bytes_max = 4 << 20;  // chunks a slow client may leave queued
  absl::Duration read_max = absl::Seconds(30);   // a request must arrive whole within
  absl::Duration idle_max = absl::Seconds(120);  // a kept-alive connection may rest for
  absl::Duration write_max = absl::Seconds(30);  // each 256 KiB of an answer must leave within
};

class HttpServer {
 public:
  // Listens and serves until destroyed. `handler` must outlive the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpOptions options,
                                                           HttpHandler* handler);
  virtual ~HttpServer() = default;  // cuts what is open
  virtual int port() const = 0;
  // host:port as others can dial it, IPv6 in brackets.
  virtual std::string address() const = 0;
  // Takes no more connections, ends those there are after their current answers, and waits up to `limit`
  // until every answer is on its way. False when some is not.
  virtual bool Drain(absl::Duration limit) = 0;
};

}  // namespace deltamesh
