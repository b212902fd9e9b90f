// The answer to one request on its way from those who make it to the connection it leaves on.
//
// Thread-safe: producers put pieces in, one connection takes them out.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "services/common/http_server.h"

namespace deltamesh {

class HttpExchange {
 public:
  struct Piece {
    enum Kind { kNone, kWhole, kHead, kChunk, kEnd, kAbandoned } kind = kNone;
    HttpResponse response;
    std::string chunk;
  };

  // `wake` tells the connection that there is something to take; it may outlive the connection.
  HttpExchange(std::function<void()> wake, int64_t unread_max)
      : wake_(std::move(wake)), unread_max_(unread_max) {}

  // Producers. See HttpResponder.
  void Send(HttpResponse response);
  void Begin(HttpResponse head);
  bool Write(std::string chunk);
  void End();
  void OnGone(std::function<void()> callback);
  // The producer dropped its handle.
  void Abandon();

  // The connection.
  Piece Take();
  void MarkGone();
  void MarkComplete();
  bool gone() const;
  bool overflow() const;

 private:
  enum class State { kIdle, kBegun, kEnded };

  bool Put(Piece piece, State from, State to);

  const std::function<void()> wake_;
  const int64_t unread_max_;
  mutable std::mutex mu_;
  State state_ = State::kIdle;
  bool gone_ = false, complete_ = false, overflow_ = false;
  int64_t queued_ = 0;
  std::deque<Piece> pieces_;
  std::function<void()> on_gone_;
};

// What a handler holds.
std::shared_ptr<HttpResponder> MakeResponder(std::shared_ptr<HttpExchange> exchange);

}  // namespace deltamesh
