#include "services/common/http_server.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {

namespace net = boost::asio;
namespace http = boost::beast::http;
using Tcp = net::ip::tcp;
using Error = boost::system::error_code;

std::string_view HttpRequest::Header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return {};
}

namespace {

constexpr auto kAwait = net::as_tuple(net::use_awaitable);

class Session;

// Whether the event loop still takes work. Producers outlive the server: they post under this lock only.
struct Life {
  std::mutex mu;
  bool alive = true;
};

// The shared part of one request's answer: producers put pieces in, the session takes them out.
class Exchange {
 public:
  struct Piece {
    enum Kind { kNone, kWhole, kHead, kChunk, kEnd, kAbandoned } kind = kNone;
    HttpResponse response;
    std::string chunk;
  };

  Exchange(std::shared_ptr<Life> life, std::weak_ptr<Session> session, int64_t unread_max)
      : life_(std::move(life)), session_(std::move(session)), unread_max_(unread_max) {}

  void Send(HttpResponse response) {
    Put(Piece{Piece::kWhole, std::move(response), {}}, State::kIdle, State::kEnded);
  }
  void Begin(HttpResponse head) {
    Put(Piece{Piece::kHead, std::move(head), {}}, State::kIdle, State::kBegun);
  }
  bool Write(std::string chunk) {
    if (chunk.empty()) return !gone();  // an empty chunk would end the stream on the wire
    {
      std::lock_guard lock(mu_);
      queued_ += static_cast<int64_t>(chunk.size());
      if (!gone_ && queued_ > unread_max_) overflow_ = true;
    }
    return Put(Piece{Piece::kChunk, {}, std::move(chunk)}, State::kBegun, State::kBegun);
  }
  void End() { Put(Piece{Piece::kEnd, {}, {}}, State::kBegun, State::kEnded); }

  // The producer dropped its handle.
  void Abandon() {
    {
      std::lock_guard lock(mu_);
      if (state_ == State::kEnded || gone_) return;
      state_ = State::kEnded;
      pieces_.push_back(Piece{Piece::kAbandoned, {}, {}});
    }
    Notify();
  }

  void OnGone(std::function<void()> callback) {
    {
      std::lock_guard lock(mu_);
      if (!gone_) {
        if (!complete_) on_gone_ = std::move(callback);
        return;
      }
    }
    callback();
  }

  // Session side.
  Piece Take() {
    std::lock_guard lock(mu_);
    if (pieces_.empty()) return {};
    Piece piece = std::move(pieces_.front());
    pieces_.pop_front();
    queued_ -= static_cast<int64_t>(piece.chunk.size());
    return piece;
  }
  void MarkGone() {
    std::function<void()> callback;
    {
      std::lock_guard lock(mu_);
      if (gone_ || complete_) return;
      gone_ = true;
      pieces_.clear();
      callback = std::exchange(on_gone_, nullptr);
    }
    if (callback) callback();
  }
  void MarkComplete() {
    std::lock_guard lock(mu_);
    complete_ = true;
    on_gone_ = nullptr;
  }
  bool gone() const {
    std::lock_guard lock(mu_);
    return gone_;
  }
  bool overflow() const {
    std::lock_guard lock(mu_);
    return overflow_;
  }

 private:
  enum class State { kIdle, kBegun, kEnded };

  bool Put(Piece piece, State from, State to) {
    bool taken;
    {
      std::lock_guard lock(mu_);
      taken = !gone_ && !overflow_ && state_ == from;
      if (taken) {
        state_ = to;
        pieces_.push_back(std::move(piece));
      }
    }
    Notify();
    return taken;
  }
  void Notify();

  const std::shared_ptr<Life> life_;
  const std::weak_ptr<Session> session_;
  const int64_t unread_max_;
  mutable std::mutex mu_;
  State state_ = State::kIdle;
  bool gone_ = false, complete_ = false, overflow_ = false;
  int64_t queued_ = 0;
  std::deque<Piece> pieces_;
  std::function<void()> on_gone_;
};

// What a handler holds.
class Responder final : public HttpResponder {
 public:
  explicit Responder(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}
  ~Responder() override { exchange_->Abandon(); }
  void Send(HttpResponse response) override { exchange_->Send(std::move(response)); }
  void Begin(HttpResponse head) override { exchange_->Begin(std::move(head)); }
  bool Write(std::string chunk) override { return exchange_->Write(std::move(chunk)); }
  void End() override { exchange_->End(); }
  void OnGone(std::function<void()> gone) override { exchange_->OnGone(std::move(gone)); }

 private:
  const std::shared_ptr<Exchange> exchange_;
};

// What sessions share with their server.
struct Shared {
  HttpOptions options;
  HttpHandler* handler = nullptr;
  std::shared_ptr<Life> life = std::make_shared<Life>();
  std::atomic<int64_t> connections{0};
  std::mutex mu;
  std::map<const Exchange*, std::weak_ptr<Exchange>> open;  // answers in progress
};

// One connection. Everything runs on its strand.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(Tcp::socket socket, std::shared_ptr<Shared> shared)
      : socket_(std::move(socket)),
        deadline_(socket_.get_executor()),
        wake_(socket_.get_executor()),
        shared_(std::move(shared)) {
    ++shared_->connections;
  }
  ~Session() { --shared_->connections; }

  net::awaitable<void> Run(bool over_bound);
  void Notify() {
    notified_ = true;
    wake_.cancel();
  }
  Tcp::socket& socket() { return socket_; }

 private:
  using Parser = http::request_parser<http::string_body>;

  net::awaitable<bool> ReadRequest(Parser* parser);
  net::awaitable<bool> Answer(HttpRequest request, unsigned version, bool keep_alive, bool head);
  net::awaitable<bool> Relay(Exchange* exchange, unsigned version, bool keep_alive, bool head);
  net::awaitable<bool> WriteHead(const HttpResponse& response, unsigned version, bool keep_alive);
  net::awaitable<bool> WriteWhole(HttpResponse response, unsigned version, bool keep_alive,
                                  bool head);
  net::awaitable<bool> WriteBytes(std::string bytes);
  net::awaitable<void> Watch(std::shared_ptr<Exchange> exchange);
  // `target` is the request's, as far as it was read.
  net::awaitable<void> Refuse(int status, std::string why, std::string target = "");
  bool ReadAhead();
  net::awaitable<void> WaitNotified();
  void Arm(absl::Duration limit);
  void Disarm() { deadline_.cancel(); }

  Tcp::socket socket_;
  net::steady_timer deadline_;  // cuts the operation in progress
  net::steady_timer wake_;      // a condition variable: cancelled to notify
  bool notified_ = false;
  bool timed_out_ = false;
  bool watching_ = false;
  bool answered_ = false;  // the current answer is complete: the watcher leaves
  uint64_t armed_ = 0;
  boost::beast::flat_buffer buffer_;
  const std::shared_ptr<Shared> shared_;
};

void Exchange::Notify() {
  std::lock_guard lock(life_->mu);
  if (!life_->alive) return;
  if (std::shared_ptr<Session> session = session_.lock()) {
    auto executor = session->socket().get_executor();
    net::post(executor, [session = std::move(session)] { session->Notify(); });
  }
}

// `message` is plain text for people; clients of an API get the handler's own errors.
HttpResponse PlainError(int status, std::string message) {
  return {.status = status,
          .content_type = "text/plain; charset=utf-8",
          .headers = {},
          .body = std::move(message) + "\n"};
}

void Session::Arm(absl::Duration limit) {
  timed_out_ = false;
  const uint64_t ticket = ++armed_;
  deadline_.expires_after(std::chrono::milliseconds(absl::ToInt64Milliseconds(limit)));
  deadline_.async_wait([self = shared_from_this(), ticket](const Error& error) {
    // A timer that was moved on meanwhile must not cut the next operation.
    if (error || ticket != self->armed_) return;
    self->timed_out_ = true;
    Error ignored;
    self->socket_.cancel(ignored);
  });
}

net::awaitable<void> Session::WaitNotified() {
  if (!notified_) {
    wake_.expires_at(net::steady_timer::time_point::max());
    co_await wake_.async_wait(kAwait);
  }
  notified_ = false;
}

// Answers and closes in a way that lets the client read the answer although it is still sending.
net::awaitable<void> Session::Refuse(int status, std::string why, std::string target) {
  HttpResponse refusal = shared_->handler->Refusal(status, std::move(why), target);
  const bool written = co_await WriteWhole(std::move(refusal), 11, false, false);
  if (!written) co_return;
  Error ignored;
  socket_.shutdown(Tcp::socket::shutdown_send, ignored);
  std::string sink(64 << 10, '\0');
  Arm(absl::Seconds(2));
  for (;;) {
    auto [error, bytes] = co_await socket_.async_read_some(net::buffer(sink), kAwait);
    if (error) break;
  }
  Disarm();
}

net::awaitable<bool> Session::ReadRequest(Parser* parser) {
  const HttpOptions& options = shared_->options;
  parser->header_limit(static_cast<uint32_t>(options.header_bytes_max));
  parser->body_limit(static_cast<uint64_t>(options.body_bytes_max));
  // Empty lines between requests are nothing; what they stand before may be long in coming.
  while (buffer_.size() > 0) {
    const char first = *static_cast<const char*>(buffer_.data().data());
    if (first != '\r' && first != '\n') break;
    buffer_.consume(1);
  }
  if (buffer_.size() == 0) {
    Arm(options.idle_max);
    auto [idle_error] = co_await socket_.async_wait(Tcp::socket::wait_read, kAwait);
    Disarm();
    if (idle_error) co_return false;
  }
  Arm(options.read_max);
  auto [head_error, head_bytes] =
      co_await http::async_read_header(socket_, buffer_, *parser, kAwait);
  Error error = head_error;
  if (!error && boost::beast::iequals(parser->get()[http::field::expect], "100-continue")) {
    const bool written = co_await WriteBytes("HTTP/1.1 100 Continue\r\n\r\n");
    if (!written) co_return false;
    Arm(options.read_max);
  }
  if (!error) {
    auto [body_error, body_bytes] = co_await http::async_read(socket_, buffer_, *parser, kAwait);
    error = body_error;
  }
  Disarm();
  if (!error) co_return true;
  const std::string target(parser->get().target());
  if (timed_out_) {
    co_await Refuse(
        408, "the request did not arrive within " + absl::FormatDuration(options.read_max), target);
  } else if (error == http::error::body_limit) {
    co_await Refuse(
        413, absl::StrFormat("the body is larger than %d bytes", options.body_bytes_max), target);
  } else if (error == http::error::header_limit) {
    co_await Refuse(431,
                    absl::StrFormat("the header is larger than %d bytes", options.header_bytes_max),
                    target);
  } else if (error != http::error::end_of_stream && error != http::error::partial_message &&
             error.category() == http::make_error_code(http::error::bad_method).category()) {
    co_await Refuse(400, "not HTTP/1.1: " + error.message(), target);
  }
  co_return false;
}

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

net::awaitable<void> Session::Run(bool over_bound) {
  const std::shared_ptr<Session> self = shared_from_this();
  if (over_bound) {
    co_await Refuse(503, absl::StrFormat("%d connections are open, the bound; retry later",
                                         shared_->options.connections_max));
    co_return;
  }
  for (bool again = true; again;) {
    Parser parser;
    const bool read = co_await ReadRequest(&parser);
    if (!read) break;
    auto message = parser.release();
    HttpRequest request;
    request.method = std::string(message.method_string());
    for (const auto& field : message) {
      std::string name(field.name_string());
      std::transform(name.begin(), name.end(), name.begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      request.headers.emplace_back(std::move(name), std::string(field.value()));
    }
    const std::string target(message.target());
    const bool keep_alive = message.keep_alive();
    const unsigned version = message.version();
    request.body = std::move(message.body());
    if (message.method() == http::verb::unknown) {
      co_await Refuse(501, "method " + request.method + " is not served", target);
      break;
    }
    if (message.method() == http::verb::options) {
      HttpResponse options{.status = 204, .content_type = "", .headers = {}, .body = ""};
      options.headers = {{"Allow", "GET, HEAD, POST, OPTIONS"}};
      const bool written = co_await WriteWhole(std::move(options), version, keep_alive, false);
      again = written && keep_alive;
      continue;
    }
    if (!SplitTarget(target, &request)) {
      co_await Refuse(400, "the target is not a path");
      break;
    }
    if (version >= 11 && request.Header("host").empty()) {
      co_await Refuse(400, "no Host header", target);
      break;
    }
    const bool head = message.method() == http::verb::head;
    if (head) request.method = "GET";
    again = co_await Answer(std::move(request), version, keep_alive, head);
  }
  Error ignored;
  socket_.shutdown(Tcp::socket::shutdown_both, ignored);
  socket_.close(ignored);
}

net::awaitable<bool> Session::Answer(HttpRequest request, unsigned version, bool keep_alive,
                                     bool head) {
  auto exchange = std::make_shared<Exchange>(shared_->life, weak_from_this(),
                                             shared_->options.unread_bytes_max);
  {
    std::lock_guard lock(shared_->mu);
    shared_->open[exchange.get()] = exchange;
  }
  notified_ = false;
  answered_ = false;
  watching_ = true;
  net::co_spawn(socket_.get_executor(), Watch(exchange), net::detached);
  try {
    shared_->handler->Handle(std::move(request), std::make_shared<Responder>(exchange));
  } catch (const std::exception& e) {
    LogError("http.handler_threw", {{"what", e.what()}});
  }
  const bool complete = co_await Relay(exchange.get(), version, keep_alive, head);
  if (complete) {
    exchange->MarkComplete();
  } else {
    exchange->MarkGone();
  }
  {
    std::lock_guard lock(shared_->mu);
    shared_->open.erase(exchange.get());
  }
  // The watcher must have left the socket before the next request is read from it.
  answered_ = true;
  Error ignored;
  socket_.cancel(ignored);
  while (watching_) co_await WaitNotified();
  co_return complete&& keep_alive&& version >= 11;
}

// Moves pieces from the exchange to the socket. True when the whole answer was written.
net::awaitable<bool> Session::Relay(Exchange* exchange, unsigned version, bool keep_alive,
                                    bool head) {
  bool begun = false;
  const bool chunked = version >= 11;
  for (;;) {
    if (exchange->gone() || exchange->overflow()) co_return false;
    Exchange::Piece piece = exchange->Take();
    bool written = true;
    switch (piece.kind) {
      case Exchange::Piece::kNone:
        co_await WaitNotified();
        break;
      case Exchange::Piece::kWhole:
        written = co_await WriteWhole(std::move(piece.response), version, keep_alive, head);
        co_return written;
      case Exchange::Piece::kHead:
        begun = true;
        written = co_await WriteHead(piece.response, version, keep_alive);
        break;
      case Exchange::Piece::kChunk:
        if (head) break;
        if (chunked) piece.chunk = absl::StrFormat("%x\r\n%s\r\n", piece.chunk.size(), piece.chunk);
        written = co_await WriteBytes(std::move(piece.chunk));
        break;
      case Exchange::Piece::kEnd:
        if (chunked && !head) written = co_await WriteBytes("0\r\n\r\n");
        co_return written&& chunked;  // without chunks, the end of the connection is the end
      case Exchange::Piece::kAbandoned:
        if (!begun) {
          written =
              co_await WriteWhole(PlainError(500, "the request was dropped"), version, false, head);
        }
        co_return false;
    }
    if (!written) co_return false;
  }
}

net::awaitable<bool> Session::WriteBytes(std::string bytes) {
  Arm(shared_->options.write_max);
  auto [error, count] = co_await net::async_write(socket_, net::buffer(bytes), kAwait);
  Disarm();
  co_return !error;
}

void FillHead(const HttpResponse& response, http::fields* fields) {
  fields->set(http::field::server, "deltamesh");
  if (!response.content_type.empty()) fields->set(http::field::content_type, response.content_type);
  for (const auto& [name, value] : response.headers) fields->set(name, value);
}

net::awaitable<bool> Session::WriteHead(const HttpResponse& response, unsigned version,
                                        bool keep_alive) {
  http::response<http::empty_body> message(static_cast<http::status>(response.status), version);
  FillHead(response, &message.base());
  message.keep_alive(keep_alive && version >= 11);
  if (version >= 11) message.chunked(true);
  http::response_serializer<http::empty_body> serializer(message);
  Arm(shared_->options.write_max);
  auto [error, count] = co_await http::async_write_header(socket_, serializer, kAwait);
  Disarm();
  co_return !error;
}

net::awaitable<bool> Session::WriteWhole(HttpResponse response, unsigned version, bool keep_alive,
                                         bool head) {
  http::response<http::string_body> message(static_cast<http::status>(response.status), version);
  FillHead(response, &message.base());
  message.keep_alive(keep_alive && version >= 11);
  const size_t size = response.body.size();
  if (!head) message.body() = std::move(response.body);
  if (response.status != 204) message.content_length(size);
  http::response_serializer<http::string_body> serializer(message);
  Arm(shared_->options.write_max);
  if (head) {
    auto [error, count] = co_await http::async_write_header(socket_, serializer, kAwait);
    Disarm();
    co_return !error;
  }
  auto [error, count] = co_await http::async_write(socket_, serializer, kAwait);
  Disarm();
  co_return !error;
}

// Takes what the client sent before its turn; false when that is more than one whole request. Only
// reading shows that a client is gone, so the bytes cannot stay in the socket.
bool Session::ReadAhead() {
  constexpr size_t kPiece = 16 << 10;
  const HttpOptions& options = shared_->options;
  Error error;
  const size_t count = socket_.read_some(buffer_.prepare(kPiece), error);
  if (error == net::error::would_block || error == net::error::try_again) return true;
  buffer_.commit(count);
  return !error &&
         static_cast<int64_t>(buffer_.size()) <= options.header_bytes_max + options.body_bytes_max;
}

// Notices a client that leaves while its answer is made.
net::awaitable<void> Session::Watch(std::shared_ptr<Exchange> exchange) {
  const std::shared_ptr<Session> self = shared_from_this();
  Error error;
  socket_.non_blocking(true, error);
  while (!answered_ && !error) {
    auto [wait_error] = co_await socket_.async_wait(Tcp::socket::wait_read, kAwait);
    if (answered_) break;
    // A timed-out write cancels this wait too; the writer tells the exchange.
    if (wait_error) break;
    if (ReadAhead()) continue;
    exchange->MarkGone();
    break;
  }
  watching_ = false;
  Notify();
}

class Server final : public HttpServer {
 public:
  Server(HttpOptions options, HttpHandler* handler)
      : shared_(std::make_shared<Shared>()), acceptor_(io_) {
    shared_->options = std::move(options);
    shared_->handler = handler;
  }
  ~Server() override {
    std::vector<std::weak_ptr<Exchange>> open;
    {
      std::lock_guard lock(shared_->mu);
      for (const auto& [key, exchange] : shared_->open) open.push_back(exchange);
    }
    {
      std::lock_guard lock(shared_->life->mu);
      shared_->life->alive = false;
    }
    io_.stop();
    for (std::thread& t : threads_) t.join();
    for (const auto& weak : open) {
      if (const auto exchange = weak.lock()) exchange->MarkGone();
    }
  }

  absl::Status Listen() {
    const HttpOptions& o = shared_->options;
    Error error;
    const auto found = Tcp::resolver(io_).resolve(o.address, std::to_string(o.port), error);
    if (error || found.empty()) {
      return InvalidArgument(
          "http address: \"%s\" is no address of this machine: %s; use 127.0.0.1 or "
          "0.0.0.0",
          o.address, error.message());
    }
    const Tcp::endpoint endpoint = *found.begin();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(net::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(net::socket_base::max_listen_connections, error);
    if (error) {
      return Unavailable("http port %s:%d cannot be listened on: %s; choose another", o.address,
                         o.port, error.message());
    }
    port_ = acceptor_.local_endpoint().port();
    net::co_spawn(io_, Accept(), net::detached);
    for (int i = 0; i < o.threads; ++i) threads_.emplace_back([this] { io_.run(); });
    return absl::OkStatus();
  }

  int port() const override { return port_; }

 private:
  net::awaitable<void> Accept() {
    for (;;) {
      auto [error, socket] = co_await acceptor_.async_accept(net::make_strand(io_), kAwait);
      if (error) {
        // Out of descriptors, most likely: those in use must end first.
        net::steady_timer pause(io_, std::chrono::milliseconds(100));
        co_await pause.async_wait(kAwait);
        continue;
      }
      Error ignored;
      socket.set_option(Tcp::no_delay(true), ignored);
      const bool over = shared_->connections >= shared_->options.connections_max;
      auto executor = socket.get_executor();
      auto session = std::make_shared<Session>(Tcp::socket(std::move(socket)), shared_);
      // The callable keeps the session until its coroutine has taken hold of it.
      net::co_spawn(
          executor, [session, over]() -> net::awaitable<void> { co_await session->Run(over); },
          net::detached);
    }
  }

  const std::shared_ptr<Shared> shared_;
  net::io_context io_;
  Tcp::acceptor acceptor_;
  int port_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace

HttpResponse HttpHandler::Refusal(int status, std::string why, std::string_view) {
  return PlainError(status, std::move(why));
}

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
