// The listening side; a connection is http_connection.h, bytes and their meaning http_wire.h.
#include "services/common/http_server.h"

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/system/errc.hpp>
#include <deque>
#include <set>
#include <thread>

#include "runtime/base/status.h"
#include "services/common/address.h"
#include "services/common/http_connection.h"

namespace deltamesh {

namespace net = boost::asio;
using Tcp = net::ip::tcp;
using Error = boost::system::error_code;

namespace {

constexpr auto kAwait = net::as_tuple(net::use_awaitable);

class Server final : public HttpServer {
 public:
  Server(HttpOptions options, HttpHandler* handler)
      : shared_(std::make_shared<HttpShared>()), accept_strand_(net::make_strand(io_)) {
    shared_->options = std::move(options);
    HttpOptions& o = shared_->options;
    o.reading_bytes_max = std::max(o.reading_bytes_max, o.body_bytes_max);  // one may always arrive
    shared_->handler = handler;
  }

  ~Server() override {
    std::set<std::shared_ptr<HttpExchange>> open;
    {
      std::lock_guard lock(shared_->mu);
      open = shared_->open;
    }
    {
      std::lock_guard lock(shared_->life->mu);
      shared_->life->alive = false;
    }
    io_.stop();
    for (std::thread& t : threads_) t.join();
    for (const auto& exchange : open) exchange->MarkGone();
  }

  // A name may have addresses of both kinds: all that are this machine's are listened on, with one port.
  absl::Status Listen() {
    const HttpOptions& o = shared_->options;
    Error error;
    const auto found = Tcp::resolver(io_).resolve(o.address, std::to_string(o.port),
                                                  Tcp::resolver::passive, error);
    if (error || found.empty()) {
      return InvalidArgument(
          "http address: \"%s\" is no address of this machine: %s; use localhost, 0.0.0.0 or [::]",
          o.address, error.message());
    }
    std::set<Tcp::endpoint> endpoints;
    for (const auto& entry : found) endpoints.insert(entry.endpoint());
    for (Tcp::endpoint endpoint : endpoints) {
      if (port_ != 0) endpoint.port(static_cast<uint16_t>(port_));
      error = ListenOn(endpoint);
      if (error && !NotOurs(error)) break;
    }
    if (acceptors_.empty() || (error && !NotOurs(error))) {
      return Unavailable("http port %s cannot be listened on: %s; choose another",
                         JoinHostPort(o.address, o.port), error.message());
    }
    for (Tcp::acceptor& acceptor : acceptors_) {
      net::co_spawn(accept_strand_, Accept(acceptor), net::detached);
    }
    for (int i = 0; i < o.threads; ++i) threads_.emplace_back([this] { io_.run(); });
    return absl::OkStatus();
  }

  int port() const override { return port_; }

  std::string address() const override {
    const std::string& host = shared_->options.address;
    return JoinHostPort(host == "0.0.0.0" || host == "::" ? "127.0.0.1" : host, port_);
  }

  bool Drain(absl::Duration limit) override {
    shared_->draining = true;
    net::post(accept_strand_, [this] {
      Error ignored;
      for (Tcp::acceptor& acceptor : acceptors_) acceptor.close(ignored);
    });
    std::unique_lock lock(shared_->mu);
    return shared_->closed.wait_for(lock, absl::ToChronoMilliseconds(limit),
                                    [this] { return shared_->open.empty(); });
  }

 private:
  // A name may have an address of a kind that this machine lacks.
  static bool NotOurs(const Error& error) {
    return error == boost::system::errc::address_not_available ||
           error == boost::system::errc::address_family_not_supported;
  }

  Error ListenOn(const Tcp::endpoint& endpoint) {
    Error error;
    Tcp::acceptor acceptor(accept_strand_);
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(net::socket_base::reuse_address(true), error);
    // "::" is every address, also those of IPv4; any other is itself only.
    if (!error && endpoint.protocol() == Tcp::v6()) {
      acceptor.set_option(net::ip::v6_only(!endpoint.address().is_unspecified()), error);
    }
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(net::socket_base::max_listen_connections, error);
    if (error) return error;
    port_ = acceptor.local_endpoint().port();
    acceptors_.push_back(std::move(acceptor));
    return error;
  }

  net::awaitable<void> Accept(Tcp::acceptor& acceptor) {
    while (acceptor.is_open()) {
      auto [error, socket] = co_await acceptor.async_accept(net::make_strand(io_), kAwait);
      if (error) {
        // Out of descriptors, most likely: those in use must end first.
        net::steady_timer pause(accept_strand_, std::chrono::milliseconds(100));
        co_await pause.async_wait(kAwait);
        continue;
      }
      Error ignored;
      socket.set_option(Tcp::no_delay(true), ignored);
      const bool over = shared_->connections >= shared_->options.connections_max;
      ServeHttpConnection(Tcp::socket(std::move(socket)), shared_, over);
    }
  }

  const std::shared_ptr<HttpShared> shared_;
  net::io_context io_;
  net::strand<net::io_context::executor_type> accept_strand_;
  std::deque<Tcp::acceptor>
      acceptors_;  // on the strand once threads run; their places do not change
  int port_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpOptions options,
                                                              HttpHandler* handler) {
  if (options.threads < 1 || options.connections_max < 1 || options.header_bytes_max < 256 ||
      options.body_bytes_max < 1 || options.unread_bytes_max < 1) {
    return InvalidArgument(
        "http options: threads and bounds must be positive, headers at least 256");
  }
  auto server = std::make_unique<Server>(std::move(options), handler);
  RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace deltamesh
