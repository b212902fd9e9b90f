// A blocking HTTP client over a plain socket, so that tests control every byte and see every byte.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>

namespace deltamesh {

class RawHttp {
 public:
  explicit RawHttp(int port, int family = AF_INET) {
    if (family == AF_INET6) {
      Connect6(port);
      return;
    }
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~RawHttp() { Close(); }
  RawHttp(const RawHttp&) = delete;

  bool connected() const { return connected_; }
  void Close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  // Leaves so that the server hears of it at once, whatever of what was sent it has not read.
  void Reset() {
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    Close();
  }
  // Says that nothing more comes from here; answers are still read.
  void EndSending() { ::shutdown(fd_, SHUT_WR); }
  // False when the server closed first.
  bool Send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }

  // Reads until `until` was seen (it stays in the answer), the peer closed, or `limit_ms` passed.
  std::string ReadUntil(std::string_view until, int limit_ms = 5000) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
    for (;;) {
      if (const size_t at = buffer_.find(until); !until.empty() && at != buffer_.npos) {
        return Cut(at + until.size());
      }
      if (!More(end)) return Cut(buffer_.size());
    }
  }
  std::string ReadBytes(size_t count, int limit_ms = 5000) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
    while (buffer_.size() < count && More(end)) {
    }
    return Cut(std::min(count, buffer_.size()));
  }
  // Everything until the peer closes.
  std::string ReadAll(int limit_ms = 5000) { return ReadUntil("", limit_ms); }
  bool closed_by_peer() const { return eof_; }

  struct Response {
    int status = 0;
    std::string head, body;
  };
  // One whole answer, by its Content-Length or its chunks (decoded).
  Response ReadResponse(int limit_ms = 10000) {
    Response r;
    do {  // interim answers are passed over, as every client must
      r.head = ReadUntil("\r\n\r\n", limit_ms);
    } while (r.head.starts_with("HTTP/1.1 1"));
    if (r.head.size() > 12) r.status = std::atoi(r.head.c_str() + 9);
    if (r.head.find("Transfer-Encoding: chunked") != r.head.npos) {
      for (;;) {
        const std::string size = ReadUntil("\r\n", limit_ms);
        const size_t count = std::strtoul(size.c_str(), nullptr, 16);
        const std::string chunk = ReadBytes(count + 2, limit_ms);
        if (count == 0 || chunk.size() < count) break;
        r.body += chunk.substr(0, count);
      }
    } else if (const size_t at = r.head.find("Content-Length: "); at != r.head.npos) {
      r.body = ReadBytes(std::strtoul(r.head.c_str() + at + 16, nullptr, 10), limit_ms);
    }
    return r;
  }

  static std::string Post(std::string_view path, std::string_view body) {
    return "POST " + std::string(path) +
           " HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + std::string(body);
  }
  static std::string Get(std::string_view path) {
    return "GET " + std::string(path) + " HTTP/1.1\r\nHost: t\r\n\r\n";
  }

 private:
  void Connect6(int port) {
    fd_ = ::socket(AF_INET6, SOCK_STREAM, 0);
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<uint16_t>(port));
    address.sin6_addr = in6addr_loopback;
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  std::string Cut(size_t count) {
    std::string out = buffer_.substr(0, count);
    buffer_.erase(0, count);
    return out;
  }
  bool More(std::chrono::steady_clock::time_point end) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (eof_ || left.count() <= 0) return false;
    pollfd p{fd_, POLLIN, 0};
    if (::poll(&p, 1, static_cast<int>(left.count())) <= 0) return false;
    char bytes[65536];
    const ssize_t n = ::recv(fd_, bytes, sizeof(bytes), 0);
    if (n <= 0) {
      eof_ = true;
      return false;
    }
    buffer_.append(bytes, static_cast<size_t>(n));
    return true;
  }

  int fd_ = -1;
  bool connected_ = false;
  bool eof_ = false;
  std::string buffer_;
};

}  // namespace deltamesh
