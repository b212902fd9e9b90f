#include "services/common/http_connection.h"

#include <algorithm>
#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/buffers_prefix.hpp>
#include <boost/beast/core/buffers_suffix.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <optional>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/common/http_wire.h"

namespace deltamesh {

namespace net = boost::asio;
namespace http = boost::beast::http;
using Tcp = net::ip::tcp;
using Error = boost::system::error_code;

namespace {

constexpr auto kAwait = net::as_tuple(net::use_awaitable);

constexpr size_t kAheadMax = 64 << 10;  // bytes taken from a client before their turn
constexpr size_t kReadPiece = 16 << 10;
constexpr size_t kWritePiece = 256 << 10;

// Most of what has arrived and is not taken out yet. A chunk's line and a trailer have no bound of their own.
size_t BufferMax(const HttpOptions& options) {
  return std::max(static_cast<size_t>(options.header_bytes_max), kAheadMax) + kReadPiece;
}

// What the answer to one request depends on besides its content.
struct Terms {
  unsigned version = 11;
  bool keep_alive = false;
  bool head = false;  // the client wants no body

  bool chunks() const { return version >= 11; }
};

// The part of a body that has arrived, counted among those of all connections.
class ArrivedBytes {
 public:
  explicit ArrivedBytes(HttpShared* shared) : shared_(shared) {}
  ~ArrivedBytes() { shared_->reading_bytes -= bytes_; }
  ArrivedBytes(const ArrivedBytes&) = delete;
  ArrivedBytes& operator=(const ArrivedBytes&) = delete;

  // False when all of them together are more than the bound.
  bool Grow(size_t bytes) {
    const int64_t more = static_cast<int64_t>(bytes) - bytes_;
    bytes_ += more;
    return (shared_->reading_bytes += more) <= shared_->options.reading_bytes_max;
  }

 private:
  HttpShared* const shared_;
  int64_t bytes_ = 0;
};

// Everything runs on its strand.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Tcp::socket socket, std::shared_ptr<HttpShared> shared)
      : socket_(std::move(socket)),
        deadline_(socket_.get_executor()),
        wake_(socket_.get_executor()),
        buffer_(BufferMax(shared->options)),
        shared_(std::move(shared)) {
    ++shared_->connections;
  }
  ~Connection() { --shared_->connections; }

  net::awaitable<void> Run(bool over_bound);

 private:
  using Parser = http::request_parser<http::string_body>;
  enum class ReadResult { kBytes, kFull, kEnd, kLost };

  // False when there will be no other request.
  net::awaitable<bool> AwaitRequest();
  net::awaitable<bool> ReadRequest(Parser* parser);
  // An HTTP status to refuse with, 0 when the body is whole or `error` says what went wrong.
  net::awaitable<int> ReadBody(Parser* parser, Error* error);
  net::awaitable<bool> Serve(HttpMessage message);
  net::awaitable<bool> Answer(HttpRequest request, Terms terms);
  net::awaitable<bool> Relay(HttpExchange* exchange, Terms terms);
  net::awaitable<bool> AwaitPiece(bool begun);
  net::awaitable<void> Watch(std::shared_ptr<HttpExchange> exchange, bool can_probe);
  ReadResult ReadAhead();
  // `target` is the request's, as far as it was read.
  net::awaitable<void> Refuse(int status, std::string why, std::string target = "");
  net::awaitable<bool> WriteWhole(HttpResponse response, Terms terms);
  net::awaitable<bool> WriteBytes(std::string_view first, std::string_view second = {});

  std::function<void()> Waker();
  void Notify() {
    notified_ = true;
    wake_.cancel();
  }
  net::awaitable<void> WaitNotified();
  void Arm(absl::Duration limit);
  // A deadline that passed just now may have its handler queued: it cuts nothing any more.
  void Disarm() {
    ++armed_;
    deadline_.cancel();
  }

  Tcp::socket socket_;
  net::steady_timer deadline_;  // cuts the operation in progress
  net::steady_timer wake_;      // a condition variable: cancelled to notify
  bool notified_ = false;
  bool timed_out_ = false;
  bool watching_ = false;
  bool answered_ = false;      // the current answer is complete: the watcher leaves
  bool probe_wanted_ = false;  // the client ended its side: is it there?
  uint64_t armed_ = 0;
  boost::beast::flat_buffer buffer_;
  const std::shared_ptr<HttpShared> shared_;
};

std::function<void()> Connection::Waker() {
  return [life = shared_->life, weak = weak_from_this()] {
    std::lock_guard lock(life->mu);
    if (!life->alive) return;
    if (std::shared_ptr<Connection> self = weak.lock()) {
      auto executor = self->socket_.get_executor();
      net::post(executor, [self = std::move(self)] { self->Notify(); });
    }
  };
}

void Connection::Arm(absl::Duration limit) {
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

net::awaitable<void> Connection::WaitNotified() {
  if (!notified_) {
    wake_.expires_at(net::steady_timer::time_point::max());
    co_await wake_.async_wait(kAwait);
  }
  notified_ = false;
}

net::awaitable<void> Connection::Run(bool over_bound) {
  const std::shared_ptr<Connection> self = shared_from_this();
  if (over_bound) {
    co_await Refuse(503, absl::StrFormat("%d connections are open, the bound; retry later",
                                         shared_->options.connections_max));
    co_return;
  }
  for (bool again = true; again;) {
    Parser parser;
    again = co_await ReadRequest(&parser);
    if (again) again = co_await Serve(parser.release());
  }
  Error ignored;
  socket_.shutdown(Tcp::socket::shutdown_both, ignored);
  socket_.close(ignored);
}

// Until the first byte of a request is there. Empty lines between requests are nothing; what they stand
// before may be long in coming.
net::awaitable<bool> Connection::AwaitRequest() {
  bool armed = false;
  for (;;) {
    while (buffer_.size() > 0) {
      const char first = *static_cast<const char*>(buffer_.data().data());
      if (first != '\r' && first != '\n') break;
      buffer_.consume(1);
    }
    if (buffer_.size() > 0) break;
    // Whoever only rests holds no memory.
    buffer_.shrink_to_fit();
    if (!std::exchange(armed, true)) Arm(shared_->options.idle_max);
    auto [idle_error] = co_await socket_.async_wait(Tcp::socket::wait_read, kAwait);
    if (idle_error) co_return false;
    // Reads are as large as the room there is, otherwise 512 bytes.
    auto [error, count] = co_await socket_.async_read_some(buffer_.prepare(kReadPiece), kAwait);
    if (error) co_return false;
    buffer_.commit(count);
  }
  Disarm();
  co_return true;
}

net::awaitable<bool> Connection::ReadRequest(Parser* parser) {
  const HttpOptions& options = shared_->options;
  parser->header_limit(static_cast<uint32_t>(options.header_bytes_max));
  parser->body_limit(static_cast<uint64_t>(options.body_bytes_max));
  const bool begun = co_await AwaitRequest();
  if (!begun) co_return false;
  Arm(options.read_max);
  auto [head_error, head_bytes] =
      co_await http::async_read_header(socket_, buffer_, *parser, kAwait);
  Error error = head_error;
  if (!error && boost::beast::iequals(parser->get()[http::field::expect], "100-continue")) {
    const bool written = co_await WriteBytes("HTTP/1.1 100 Continue\r\n\r\n");
    if (!written) co_return false;
    Arm(options.read_max);
  }
  int refused = 0;
  if (!error) refused = co_await ReadBody(parser, &error);
  Disarm();
  if (refused != 0) {
    co_await Refuse(refused,
                    absl::StrFormat("%d bytes of requests are arriving, the bound; retry later",
                                    options.reading_bytes_max),
                    std::string(parser->get().target()));
    co_return false;
  }
  if (!error) co_return true;
  std::optional<HttpRefusal> refusal = RefusalOfReadError(error, options);
  if (timed_out_) {
    refusal = HttpRefusal{
        408, "the request did not arrive within " + absl::FormatDuration(options.read_max)};
  }
  if (refusal) {
    co_await Refuse(refusal->status, std::move(refusal->why), std::string(parser->get().target()));
  }
  co_return false;
}

net::awaitable<int> Connection::ReadBody(Parser* parser, Error* error) {
  ArrivedBytes arrived(shared_.get());
  // What a trailer says is not the header's: proxies look at that alone.
  std::optional<http::header<true, http::fields>> header;
  if (parser->chunked()) header = parser->get().base();
  while (!*error && !parser->is_done()) {
    auto [read_error, bytes] = co_await http::async_read_some(socket_, buffer_, *parser, kAwait);
    *error = read_error;
    if (!arrived.Grow(parser->get().body().size())) co_return 503;
  }
  if (header) parser->get().base() = *std::move(header);
  co_return 0;
}

// True when the connection can take another request.
net::awaitable<bool> Connection::Serve(HttpMessage message) {
  Terms terms{.version = message.version(),
              .keep_alive = message.keep_alive() && message.version() >= 11,
              .head = message.method() == http::verb::head};
  const bool options = message.method() == http::verb::options;
  const std::string target(message.target());
  HttpRequest request;
  if (std::optional<HttpRefusal> refusal = RequestFromWire(std::move(message), &request)) {
    co_await Refuse(refusal->status, std::move(refusal->why), target);
    co_return false;
  }
  if (options) {
    HttpResponse response{.status = 204, .content_type = "", .headers = {}, .body = ""};
    response.headers = {{"Allow", "GET, HEAD, POST, OPTIONS"}};
    const bool written = co_await WriteWhole(std::move(response), terms);
    co_return written&& terms.keep_alive;
  }
  co_return co_await Answer(std::move(request), terms);
}

net::awaitable<bool> Connection::Answer(HttpRequest request, Terms terms) {
  if (shared_->draining) terms.keep_alive = false;
  auto exchange = std::make_shared<HttpExchange>(Waker(), shared_->options.unread_bytes_max);
  {
    std::lock_guard lock(shared_->mu);
    shared_->open.insert(exchange);
  }
  notified_ = false;
  answered_ = false;
  probe_wanted_ = false;
  watching_ = true;
  net::co_spawn(socket_.get_executor(), Watch(exchange, terms.chunks() && !terms.head),
                net::detached);
  try {
    shared_->handler->Handle(std::move(request), MakeResponder(exchange));
  } catch (const std::exception& e) {
    LogError("http.handler_threw", {{"what", e.what()}});
  }
  const bool complete = co_await Relay(exchange.get(), terms);
  if (complete) {
    exchange->MarkComplete();
  } else {
    exchange->MarkGone();
  }
  {
    std::lock_guard lock(shared_->mu);
    shared_->open.erase(exchange);
  }
  shared_->closed.notify_all();
  // The watcher must have left the socket before the next request is read from it.
  answered_ = true;
  Error ignored;
  socket_.cancel(ignored);
  while (watching_) co_await WaitNotified();
  co_return complete&& terms.keep_alive;
}

// Waits until there may be something to take, or asks the client for a sign of life when it is due: only
// here, for whatever else is written asks as well. False when the connection is lost.
net::awaitable<bool> Connection::AwaitPiece(bool begun) {
  if (!probe_wanted_) {
    co_await WaitNotified();
    co_return true;
  }
  probe_wanted_ = false;
  const bool written = co_await WriteBytes(begun ? kProbeBetweenChunks : kProbeBeforeHead);
  co_return written;
}

// Moves pieces from the exchange to the socket. True when the whole answer was written.
net::awaitable<bool> Connection::Relay(HttpExchange* exchange, Terms terms) {
  using Piece = HttpExchange::Piece;
  bool begun = false;
  for (;;) {
    if (exchange->gone() || exchange->overflow()) co_return false;
    Piece piece = exchange->Take();
    bool written = true;
    switch (piece.kind) {
      case Piece::kNone:
        written = co_await AwaitPiece(begun);
        break;
      case Piece::kWhole:
        written = co_await WriteWhole(std::move(piece.response), terms);
        co_return written;
      case Piece::kHead: {
        begun = true;
        const std::string head =
            ResponseHead(piece.response, terms.version, terms.keep_alive,
                         terms.chunks() ? HttpFraming::kChunks : HttpFraming::kUntilEnd);
        written = co_await WriteBytes(head);
        break;
      }
      case Piece::kChunk:
        if (terms.head) break;
        if (terms.chunks()) piece.chunk = ChunkOnWire(piece.chunk);
        written = co_await WriteBytes(piece.chunk);
        break;
      case Piece::kEnd:
        if (terms.chunks() && !terms.head) written = co_await WriteBytes(kLastChunk);
        co_return written;
      case Piece::kAbandoned:
        if (begun) co_return false;
        terms.keep_alive = false;
        co_await WriteWhole(PlainError(500, "the request was dropped"), terms);
        co_return false;
    }
    if (!written) co_return false;
  }
}

// Notices a client that leaves while its answer is made.
net::awaitable<void> Connection::Watch(std::shared_ptr<HttpExchange> exchange, bool can_probe) {
  const std::shared_ptr<Connection> self = shared_from_this();
  Error error;
  socket_.non_blocking(true, error);
  while (!answered_ && !error) {
    auto [wait_error] = co_await socket_.async_wait(Tcp::socket::wait_read, kAwait);
    // A timed-out write cancels this wait too; the writer tells the exchange.
    if (answered_ || wait_error) break;
    const ReadResult read = ReadAhead();
    if (read == ReadResult::kBytes) continue;
    const bool ask = read == ReadResult::kEnd && can_probe;
    if (ask) {
      probe_wanted_ = true;
      Notify();
    }
    if (ask || read == ReadResult::kFull) {
      // A client that is there stays silent; the system of one that is not answers with a reset.
      auto [reset_error] = co_await socket_.async_wait(Tcp::socket::wait_error, kAwait);
      if (answered_ || reset_error) break;
    }
    exchange->MarkGone();
    break;
  }
  watching_ = false;
  Notify();
}

// Takes what the client sent before its turn: only reading shows that a client is gone. What is more than
// kAheadMax stays in the socket, where the client's system holds it back.
Connection::ReadResult Connection::ReadAhead() {
  if (buffer_.size() >= kAheadMax) return ReadResult::kFull;
  Error error;
  const size_t count = socket_.read_some(buffer_.prepare(kAheadMax - buffer_.size()), error);
  if (error == net::error::would_block || error == net::error::try_again) return ReadResult::kBytes;
  buffer_.commit(count);
  if (error == net::error::eof) return ReadResult::kEnd;
  return error ? ReadResult::kLost : ReadResult::kBytes;
}

// Answers and closes in a way that lets the client read the answer although it is still sending.
net::awaitable<void> Connection::Refuse(int status, std::string why, std::string target) {
  HttpResponse refusal = shared_->handler->Refusal(status, std::move(why), target);
  const bool written = co_await WriteWhole(std::move(refusal), Terms{});
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

net::awaitable<bool> Connection::WriteWhole(HttpResponse response, Terms terms) {
  const std::string head =
      ResponseHead(response, terms.version, terms.keep_alive, HttpFraming::kLength);
  const bool written =
      co_await WriteBytes(head, terms.head ? std::string_view() : std::string_view(response.body));
  co_return written;
}

net::awaitable<bool> Connection::WriteBytes(std::string_view first, std::string_view second) {
  const std::array<net::const_buffer, 2> bytes = {net::buffer(first), net::buffer(second)};
  boost::beast::buffers_suffix<std::array<net::const_buffer, 2>> left(bytes);
  while (net::buffer_size(left) > 0) {
    // A slow client has time for all of it, but not for as little as it likes.
    Arm(shared_->options.write_max);
    auto [error, count] =
        co_await net::async_write(socket_, boost::beast::buffers_prefix(kWritePiece, left), kAwait);
    Disarm();
    if (error) co_return false;
    left.consume(count);
  }
  co_return true;
}

}  // namespace

void ServeHttpConnection(Tcp::socket socket, std::shared_ptr<HttpShared> shared, bool over_bound) {
  auto executor = socket.get_executor();
  auto connection = std::make_shared<Connection>(std::move(socket), std::move(shared));
  // The callable keeps the connection until its coroutine has taken hold of it.
  net::co_spawn(
      executor,
      [connection, over_bound]() -> net::awaitable<void> { co_await connection->Run(over_bound); },
      net::detached);
}

}  // namespace deltamesh
