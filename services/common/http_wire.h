// Between HTTP/1.1 on the wire and the server's own requests and responses. No sockets, no state.
#pragma once

#include <boost/beast/http/fields.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/system/error_code.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "services/common/http_server.h"

namespace deltamesh {

using HttpMessage =
    boost::beast::http::message<true, boost::beast::http::string_body, boost::beast::http::fields>;

// Why input is not answered as a request.
struct HttpRefusal {
  int status = 400;
  std::string why;
};

// Fills `out`. HEAD becomes GET.
std::optional<HttpRefusal> RequestFromWire(HttpMessage message, HttpRequest* out);

// What a failed read is to be answered with; nothing when the client ended the connection or lost it.
std::optional<HttpRefusal> RefusalOfReadError(const boost::system::error_code& error,
                                              const HttpOptions& options);

enum class HttpFraming {
  kLength,   // the body's length is told
  kChunks,   // chunks follow
  kUntilEnd  // the end of the connection ends the body: before HTTP/1.1
};

// Status line and headers, with the empty line.
std::string ResponseHead(const HttpResponse& response, unsigned version, bool keep_alive,
                         HttpFraming framing);

// One chunk; `bytes` must not be empty, for that is the end.
std::string ChunkOnWire(std::string_view bytes);
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

// Bytes that change nothing for a client that reads on and make the system of one that closed the
// connection answer with a reset. Every client must pass over an interim response it did not ask for
// (RFC 9110, 15.2), and a chunk's size may have leading zeros (RFC 9112, 7.1), the last chunk's too.
inline constexpr std::string_view kProbeBeforeHead = "HTTP/1.1 100 Continue\r\n\r\n";
inline constexpr std::string_view kProbeBetweenChunks = "0";

// An error for people; clients of an API get the handler's own.
HttpResponse PlainError(int status, std::string message);

}  // namespace deltamesh
