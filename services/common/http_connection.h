// One connection of the HTTP server: reads a request, has it handled, writes the answer, again.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

#include "services/common/http_exchange.h"
#include "services/common/http_server.h"

namespace deltamesh {

// Whether the event loop still takes work. Producers outlive the server: they post under this lock
// only.
struct HttpLoopLife {
  std::mutex mu;
  bool alive = true;
};

// What connections share with their server. Thread-safe as far as each part says.
struct HttpShared {
  HttpOptions options;             // constant while connections live
  HttpHandler* handler = nullptr;  // likewise
  std::shared_ptr<HttpLoopLife> life = std::make_shared<HttpLoopLife>();
  std::atomic<int64_t> connections{0};
  std::atomic<int64_t> reading_bytes{0};  // of bodies that have not wholly arrived
  std::atomic<bool> draining{false};      // answers end their connection from now on

  std::mutex mu;
  std::set<std::shared_ptr<HttpExchange>> open;  // answers in progress; under mu
  std::condition_variable closed;                // one fewer of them
};

// Serves `socket`, whose executor must be a strand, until it ends. `over_bound`: only says so.
void ServeHttpConnection(boost::asio::ip::tcp::socket socket, std::shared_ptr<HttpShared> shared,
                         bool over_bound);

}  // namespace deltamesh
