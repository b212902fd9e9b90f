// A server on loopback that answers requests as a test says: what real servers and proxies were seen to say.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "runtime/base/log.h"
#include "runtime/store/s3_client.h"

namespace deltamesh::testing {

class AnswerServer {
 public:
  // `answer`: the whole answer to a request, of which it gets the head. One connection, one request.
  explicit AnswerServer(std::function<std::string(const std::string& request)> answer)
      : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    for (const char* proxy : {"http_proxy", "all_proxy", "ALL_PROXY"}) unsetenv(proxy);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(at);
    CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&at), bytes) == 0 &&
          listen(listener_, 8) == 0);
    CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &bytes) == 0);
    port_ = ntohs(at.sin_port);
    thread_ = std::thread([this, answer = std::move(answer)] {
      for (int fd; (fd = accept(listener_, nullptr, nullptr)) >= 0; close(fd)) {
        char request[4096];
        const ssize_t had = read(fd, request, sizeof(request));
        if (had <= 0) continue;
        const std::string head(request, static_cast<size_t>(had));
        methods_.push_back(head.substr(0, head.find(' ')));
        const std::string text = answer(head);
        if (write(fd, text.data(), text.size()) < 0) continue;
        // What is sent late, closing at once would take for a reason to drop the answer.
        shutdown(fd, SHUT_WR);
        while (read(fd, request, sizeof(request)) > 0) {
        }
      }
    });
  }
  ~AnswerServer() { Stop(); }

  // Of the requests, once it has stopped.
  std::vector<std::string> Stop() {
    if (thread_.joinable()) {
      shutdown(listener_, SHUT_RDWR);
      thread_.join();
      close(listener_);
    }
    return methods_;
  }

  S3Options Options() const {
    S3Options options;
    options.server = absl::StrFormat("http://127.0.0.1:%d", port_);
    options.bucket = "mistyped";
    options.access_key = options.secret_key = "x";
    options.retry_after = absl::Milliseconds(1);
    options.down_min = options.down_max = absl::ZeroDuration();
    return options;
  }

  // `status`: such as "200 OK"; `headers`: lines, each with its end.
  static std::string Answer(const std::string& status, const std::string& body,
                            const std::string& headers = "") {
    return absl::StrFormat("HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n%s\r\n%s",
                           status, body.size(), headers, body);
  }

 private:
  const int listener_;
  int port_ = 0;
  std::vector<std::string> methods_;
  std::thread thread_;
};

}  // namespace deltamesh::testing
