#include "services/cli/bench_router_http.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/write.hpp>

#include "runtime/base/status.h"
#include "services/cli/bench_router_prompt.h"

namespace deltamesh {
namespace {

std::string RequestOf(int64_t prompt_tokens, int64_t answer_tokens, int64_t i) {
  std::string body = "{\"prompt\":[";
  for (int64_t t = 0; t < prompt_tokens; ++t) {
    if (t > 0) body += ',';
    body += std::to_string(BenchToken(t, i));
  }
  body += absl::StrFormat(
      "],\"max_tokens\":%d,\"ignore_eos\":true,\"stream\":true,"
      "\"stream_options\":{\"include_usage\":true}}",
      answer_tokens);
  return absl::StrFormat(
      "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
      "Content-Length: %d\r\n\r\n%s",
      body.size(), body);
}

}  // namespace

absl::Status StreamOverHttp(const std::string& address, int64_t prompt_tokens,
                            int64_t answer_tokens, int64_t i) {
  namespace net = boost::asio;
  constexpr std::string_view kDone = "data: [DONE]";
  const size_t colon = address.rfind(':');
  try {
    net::io_context context;
    net::ip::tcp::socket socket(context);
    net::ip::tcp::resolver resolver(context);
    net::connect(socket, resolver.resolve(address.substr(0, colon), address.substr(colon + 1)));
    net::write(socket, net::buffer(RequestOf(prompt_tokens, answer_tokens, i)));
    std::string answer;
    net::read_until(socket, net::dynamic_buffer(answer), std::string(kDone));
    const std::string usage = absl::StrFormat("\"completion_tokens\":%d,", answer_tokens);
    if (answer.find(usage) != answer.npos) return absl::OkStatus();
    return Internal("an answer over HTTP has not %d tokens: ... %s", answer_tokens,
                    answer.substr(answer.size() - std::min<size_t>(answer.size(), 300)));
  } catch (const std::exception& e) {
    return Unavailable("a request over HTTP failed: %s", e.what());
  }
}

}  // namespace deltamesh
