// The HTTP server, byte by byte over a plain socket.
#include "services/common/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <mutex>
#include <thread>

#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "runtime/base/log.h"
#include "services/common/address.h"
#include "services/common/http_ops.h"
#include "services/common/metrics.h"
#include "tests/unit/services/raw_http.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Answers by path; keeps responders of /hold.
class TestHandler final : public HttpHandler {
 public:
  void Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) override {
    if (request.path == "/echo") {
      responder->Send({.status = 200,
                       .content_type = "text/plain",
                       .headers = {{"X-Query", request.query}},
                       .body = request.method + ":" + request.body});
    } else if (request.path == "/stream") {
      std::thread([responder] {
        responder->Begin(
            {.status = 200, .content_type = "text/event-stream", .headers = {}, .body = ""});
        for (int i = 0; i < 3; ++i) {
          responder->Write("data: " + std::to_string(i) + "\n\n");
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        responder->End();
      }).detach();
    } else if (request.path == "/large") {
      responder->Send({.status = 200,
                       .content_type = "text/plain",
                       .headers = {},
                       .body = std::string(kLargeBytes, 'x')});
    } else if (request.path == "/drop") {
    } else if (request.path == "/throw") {
      throw std::runtime_error("planted");
    } else if (request.path == "/flood") {
      std::thread([this, responder] {
        responder->Begin({});
        const std::string chunk(64 << 10, 'x');
        while (responder->Write(chunk)) ++flooded;
        flood_ended = true;
      }).detach();
    } else {
      responder->OnGone([this] { gone.Notify(); });
      if (request.path == "/hold-stream") {
        responder->Begin({});
        responder->Write("first");
      }
      std::lock_guard lock(mu);
      held.push_back(responder);
    }
  }

  // The newest of the held, once there is one.
  std::shared_ptr<HttpResponder> Held() {
    for (int i = 0; i < 5000; ++i) {
      {
        std::lock_guard lock(mu);
        if (!held.empty()) return held.back();
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
    throw std::runtime_error("no request is held");
  }

  static constexpr size_t kLargeBytes = 60 << 20;  // more than sockets hold
  std::mutex mu;
  std::vector<std::shared_ptr<HttpResponder>> held;
  absl::Notification gone;
  std::atomic<int> flooded{0};
  std::atomic<bool> flood_ended{false};
};

class HttpServerTest : public ::testing::Test {
 protected:
  void Start(HttpOptions options = {}) {
    InitLog("test", LogLevel::kError);
    auto started = HttpServer::Start(options, &handler);
    ASSERT_TRUE(started.ok()) << started.status();
    server = *std::move(started);
  }
  RawHttp::Response Ask(std::string_view bytes) {
    RawHttp client(server->port());
    client.Send(bytes);
    return client.ReadResponse();
  }
  TestHandler handler;
  std::unique_ptr<HttpServer> server;
};

TEST_F(HttpServerTest, AnswersAndKeepsTheConnection) {
  Start();
  RawHttp client(server->port());
  for (int i = 0; i < 3; ++i) {
    client.Send(RawHttp::Post("/echo?a=b%20c", "body" + std::to_string(i)));
    const auto r = client.ReadResponse();
    EXPECT_EQ(r.status, 200);
    EXPECT_EQ(r.body, "POST:body" + std::to_string(i));
    EXPECT_THAT(r.head, HasSubstr("X-Query: a=b%20c\r\n"));
  }
}

TEST_F(HttpServerTest, PipelinedRequestsAreAnsweredInOrder) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Post("/echo", "1") + RawHttp::Get("/stream") + RawHttp::Post("/echo", "2"));
  EXPECT_EQ(client.ReadResponse().body, "POST:1");
  EXPECT_EQ(client.ReadResponse().body, "data: 0\n\ndata: 1\n\ndata: 2\n\n");
  EXPECT_EQ(client.ReadResponse().body, "POST:2");
}

TEST_F(HttpServerTest, RequestInSingleBytesAndChunkedBody) {
  Start();
  RawHttp client(server->port());
  const std::string bytes =
      "POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: "
      "chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
  for (const char c : bytes) client.Send(std::string_view(&c, 1));
  EXPECT_EQ(client.ReadResponse().body, "POST:abcde");
}

TEST_F(HttpServerTest, HeadHasTheLengthAndNoBody) {
  Start();
  RawHttp client(server->port());
  client.Send("HEAD /echo HTTP/1.1\r\nHost: t\r\n\r\n");
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"), HasSubstr("Content-Length: 4\r\n"));
  client.Send(RawHttp::Get("/echo"));  // the connection is still in step
  EXPECT_EQ(client.ReadResponse().body, "GET:");
}

TEST_F(HttpServerTest, OptionsNamesTheMethods) {
  Start();
  const auto r = Ask("OPTIONS /echo HTTP/1.1\r\nHost: t\r\n\r\n");
  EXPECT_EQ(r.status, 204);
  EXPECT_THAT(r.head, HasSubstr("Allow: GET, HEAD, POST, OPTIONS"));
}

TEST_F(HttpServerTest, OldClientsGetTheStreamWithoutChunks) {
  Start();
  RawHttp client(server->port());
  client.Send("GET /stream HTTP/1.0\r\n\r\n");
  const std::string all = client.ReadAll();
  EXPECT_TRUE(client.closed_by_peer());
  EXPECT_THAT(all, HasSubstr("\r\n\r\ndata: 0\n\ndata: 1\n\ndata: 2\n\n"));
  EXPECT_EQ(all.find("chunked"), all.npos);
}

TEST_F(HttpServerTest, MalformedInputIsRefusedByKind) {
  HttpOptions options;
  options.header_bytes_max = 1024;
  options.body_bytes_max = 100;
  Start(options);
  EXPECT_EQ(Ask("nonsense\r\n\r\n").status, 400);
  EXPECT_EQ(Ask("GET / HTTP/9.9\r\n\r\n").status, 400);
  EXPECT_EQ(Ask("GET /echo HTTP/1.1\r\n\r\n").status, 400);  // no Host
  EXPECT_EQ(Ask("GET echo HTTP/1.1\r\nHost: t\r\n\r\n").status, 400);
  EXPECT_EQ(Ask("GET /echo HTTP/1.1\r\nHost : t\r\n\r\n").status, 400);
  EXPECT_EQ(Ask("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: x\r\n\r\n").status, 400);
  EXPECT_EQ(Ask("BREW /echo HTTP/1.1\r\nHost: t\r\n\r\n").status, 501);
  EXPECT_EQ(
      Ask("GET /echo HTTP/1.1\r\nHost: t\r\nX: " + std::string(5000, 'a') + "\r\n\r\n").status,
      431);
  EXPECT_EQ(Ask(RawHttp::Post("/echo", std::string(101, 'a'))).status, 413);
  EXPECT_EQ(Ask(RawHttp::Post("/echo", std::string(100, 'a'))).status, 200);
}

// Neither has a bound in HTTP, and no byte of a body comes of them.
TEST_F(HttpServerTest, EndlessChunkLinesAndTrailersAreRefused) {
  Start();
  const std::string head = "POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(Ask(head + "1;" + std::string(1 << 20, 'a')).status, 400);
  std::string trailer = "0\r\n";
  while (trailer.size() < 1 << 20) trailer += "A: b\r\n";
  EXPECT_EQ(Ask(head + trailer).status, 400);
}

// Others may frame such a request differently, and take its body for the next request.
TEST_F(HttpServerTest, WhatFramesABodyDifferentlyIsRefused) {
  Start();
  for (const char* coding : {"chunked, identity", "xchunked",
                             "\x0b"
                             "chunked",
                             "gzip, chunked", "identity"}) {
    const auto r =
        Ask(absl::StrFormat("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: %s\r\n"
                            "\r\n0\r\n\r\n",
                            coding));
    EXPECT_EQ(r.status, 400) << coding;
  }
  EXPECT_EQ(Ask("GET /echo HTTP/1.1\r\nHost: t\r\nHost: u\r\n\r\n").status, 400);
  EXPECT_EQ(Ask("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: Chunked\r\n\r\n"
                "1\r\na\r\n0\r\nHost: u\r\n\r\n")
                .body,
            "POST:a")
      << "a trailer is no header";
}

TEST_F(HttpServerTest, EmptyLinesBetweenRequestsAreNothing) {
  Start();
  RawHttp client(server->port());
  client.Send("\r\n" + RawHttp::Post("/echo", "1"));
  EXPECT_EQ(client.ReadResponse().body, "POST:1");
  client.Send("\r\n");  // after the answer, and by itself
  absl::SleepFor(absl::Milliseconds(20));
  client.Send("\r\n\r\n" + RawHttp::Post("/echo", "2"));
  EXPECT_EQ(client.ReadResponse().body, "POST:2");
}

TEST_F(HttpServerTest, HugeBodyIsRefusedWhileTheClientStillSends) {
  HttpOptions options;
  options.body_bytes_max = 1000;
  Start(options);
  EXPECT_EQ(Ask(RawHttp::Post("/echo", std::string(8 << 20, 'a'))).status, 413);
}

TEST_F(HttpServerTest, ContinueIsSentBeforeTheBody) {
  Start();
  RawHttp client(server->port());
  client.Send(
      "POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.Send("ab");
  EXPECT_EQ(client.ReadResponse().body, "POST:ab");
}

TEST_F(HttpServerTest, SlowRequestsAndIdleConnectionsEnd) {
  HttpOptions options;
  options.read_max = absl::Milliseconds(100);
  options.idle_max = absl::Milliseconds(200);
  Start(options);
  RawHttp slow(server->port());
  slow.Send("POST /echo HTTP/1.1\r\nHost: t\r\n");
  EXPECT_EQ(slow.ReadResponse().status, 408);
  RawHttp idle(server->port());
  EXPECT_EQ(idle.ReadAll(3000), "");
  EXPECT_TRUE(idle.closed_by_peer());
}

TEST_F(HttpServerTest, GoneClientIsNoticedAtOnceWithNothingToSend) {
  Start();
  for (const std::string path : {"/hold-stream"}) {
    RawHttp client(server->port());
    client.Send(RawHttp::Get(path));
    EXPECT_THAT(client.ReadUntil("first"), HasSubstr("first"));
    client.Close();
    EXPECT_TRUE(handler.gone.WaitForNotificationWithTimeout(absl::Seconds(1)));
    std::lock_guard lock(handler.mu);
    EXPECT_FALSE(handler.held.back()->Write("more"));
    bool called = false;
    handler.held.back()->OnGone([&] { called = true; });
    EXPECT_TRUE(called);
  }
}

TEST_F(HttpServerTest, GoneClientIsNoticedBeforeAnyAnswer) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold"));
  for (int i = 0; i < 1000; ++i) {
    std::lock_guard lock(handler.mu);
    if (!handler.held.empty()) break;
    absl::SleepFor(absl::Milliseconds(1));
  }
  client.Close();
  EXPECT_TRUE(handler.gone.WaitForNotificationWithTimeout(absl::Seconds(1)));
}

TEST_F(HttpServerTest, GoneClientIsNoticedAfterStrayBytes) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold-stream"));
  EXPECT_THAT(client.ReadUntil("first"), HasSubstr("first"));
  client.Send("\r\n");
  absl::SleepFor(absl::Milliseconds(20));
  client.Send("GET /next");
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(handler.gone.HasBeenNotified());  // bytes alone are no farewell
  client.Close();
  EXPECT_TRUE(handler.gone.WaitForNotificationWithTimeout(absl::Seconds(1)));
}

// Until somebody asks, the end of what a client sends is not the end of the client.
TEST_F(HttpServerTest, ClientThatEndsItsSideIsAnswered) {
  Start();
  for (const std::string path : {"/echo", "/stream"}) {
    RawHttp client(server->port());
    client.Send(RawHttp::Get(path));
    client.EndSending();
    EXPECT_EQ(client.ReadResponse().status, 200) << path;
    EXPECT_EQ(client.ReadAll(), "");  // no further request can come: the connection ends
    EXPECT_TRUE(client.closed_by_peer());
  }
}

TEST_F(HttpServerTest, ClientThatEndsItsSideIsAnsweredLater) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold"));
  client.EndSending();
  // The sign of life that is asked for, before any status line.
  EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(handler.gone.HasBeenNotified());
  handler.Held()->Send(
      {.status = 200, .content_type = "text/plain", .headers = {}, .body = "late"});
  EXPECT_EQ(client.ReadResponse().body, "late");
}

TEST_F(HttpServerTest, ClientThatEndsItsSideGetsTheWholeStream) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold-stream"));
  EXPECT_THAT(client.ReadUntil("first\r\n"), HasSubstr("first"));
  client.EndSending();
  EXPECT_EQ(client.ReadBytes(1), "0");  // of the next chunk's size
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(handler.gone.HasBeenNotified());
  EXPECT_TRUE(handler.Held()->Write("more"));
  EXPECT_EQ(client.ReadUntil("more\r\n"), "4\r\nmore\r\n");
  handler.Held()->End();
  EXPECT_EQ(client.ReadAll(), "0\r\n\r\n");
  EXPECT_TRUE(client.closed_by_peer());
}

TEST_F(HttpServerTest, SignOfLifeMayEndAsTheLastChunk) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold-stream"));
  EXPECT_THAT(client.ReadUntil("first\r\n"), HasSubstr("first"));
  client.EndSending();
  EXPECT_EQ(client.ReadBytes(1), "0");
  handler.Held()->End();
  EXPECT_EQ(client.ReadAll(), "0\r\n\r\n");  // "00": a last chunk as well
}

TEST_F(HttpServerTest, PipelinedRequestsAreAnsweredAfterTheEndOfSending) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold") + RawHttp::Post("/echo", "next"));
  client.EndSending();
  EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  handler.Held()->Send({.status = 200, .content_type = "text/plain", .headers = {}, .body = "one"});
  EXPECT_EQ(client.ReadResponse().body, "one");
  EXPECT_EQ(client.ReadResponse().body, "POST:next");
}

TEST_F(HttpServerTest, ClientThatEndedItsSideAndThenLeavesIsNoticed) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold-stream"));
  EXPECT_THAT(client.ReadUntil("first\r\n"), HasSubstr("first"));
  client.EndSending();
  EXPECT_EQ(client.ReadBytes(1), "0");
  client.Close();
  for (int i = 0; i < 1000 && !handler.gone.HasBeenNotified(); ++i) {
    handler.Held()->Write("more");
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_TRUE(handler.gone.HasBeenNotified());
}

TEST_F(HttpServerTest, OldClientThatEndsItsSideIsGone) {
  Start();
  RawHttp client(server->port());
  client.Send("GET /hold HTTP/1.0\r\n\r\n");
  client.EndSending();
  EXPECT_TRUE(handler.gone.WaitForNotificationWithTimeout(absl::Seconds(1)));
  RawHttp quick(server->port());
  quick.Send("GET /echo HTTP/1.0\r\n\r\n");
  quick.EndSending();
  EXPECT_THAT(quick.ReadAll(), HasSubstr("GET:"));
}

TEST_F(HttpServerTest, BytesSentAheadAreTheNextRequest) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold-stream"));
  EXPECT_THAT(client.ReadUntil("first\r\n"), HasSubstr("first"));
  const std::string next = RawHttp::Post("/echo", std::string(100'000, 'a'));
  client.Send("\r\n");
  client.Send(next.substr(0, 50'000));
  absl::SleepFor(absl::Milliseconds(20));
  {
    std::lock_guard lock(handler.mu);
    handler.held.back()->End();
  }
  EXPECT_EQ(client.ReadUntil("0\r\n\r\n"), "0\r\n\r\n");
  client.Send(next.substr(50'000));
  EXPECT_EQ(client.ReadResponse().body, "POST:" + std::string(100'000, 'a'));
}

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

// However much clients send while an answer is made, little of it is taken before its turn, and none is
// lost.
TEST_F(HttpServerTest, WhatIsSentAheadWaitsWithTheClient) {
  constexpr size_t kClients = 16;
  Start();
  const std::string body(1 << 20, 'a'), post = RawHttp::Post("/echo", body);
  std::vector<std::unique_ptr<RawHttp>> clients;
  for (size_t i = 0; i < kClients; ++i) {
    clients.push_back(std::make_unique<RawHttp>(server->port()));
    clients.back()->Send(RawHttp::Get("/hold"));
  }
  const auto all_held = [&] {
    std::lock_guard lock(handler.mu);
    return handler.held.size() == kClients;
  };
  for (int i = 0; i < 5000 && !all_held(); ++i) absl::SleepFor(absl::Milliseconds(1));
  ASSERT_TRUE(all_held());
  const int64_t before = ResidentBytes();
  std::vector<std::thread> senders;
  for (const auto& client : clients) senders.emplace_back([&] { client->Send(post); });
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_LT(ResidentBytes() - before, 6 << 20);
  {
    std::lock_guard lock(handler.mu);
    for (const auto& responder : handler.held) {
      responder->Send({.status = 200, .content_type = "text/plain", .headers = {}, .body = "one"});
    }
  }
  for (const auto& client : clients) {
    EXPECT_EQ(client->ReadResponse().body, "one");
    EXPECT_EQ(client->ReadResponse().body, "POST:" + body);
  }
  for (std::thread& sender : senders) sender.join();
}

TEST_F(HttpServerTest, GoneClientIsNoticedBehindMoreThanIsReadAhead) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold") + RawHttp::Post("/echo", std::string(100'000, 'a')));
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(handler.gone.HasBeenNotified());
  client.Reset();
  EXPECT_TRUE(handler.gone.WaitForNotificationWithTimeout(absl::Seconds(1)));
}

TEST_F(HttpServerTest, DroppedAndThrowingHandlersAreFiveHundreds) {
  Start();
  EXPECT_EQ(Ask(RawHttp::Get("/drop")).status, 500);
  EXPECT_EQ(Ask(RawHttp::Get("/throw")).status, 500);
}

TEST_F(HttpServerTest, ReaderThatDoesNotKeepUpIsCut) {
  HttpOptions options;
  options.unread_bytes_max = 1 << 20;
  Start(options);
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/flood"));
  for (int i = 0; i < 5000 && !handler.flood_ended; ++i) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(handler.flood_ended);
  // What was queued, plus what the kernel's buffers took.
  EXPECT_LT(handler.flooded, 1000);
}

// Of the client that reads on but slowly nothing is cut, of the one that does not read the answer ends.
TEST_F(HttpServerTest, SlowReaderGetsTheWholeAnswer) {
  HttpOptions options;
  options.write_max = absl::Seconds(1);
  Start(options);
  RawHttp client(server->port()), still(server->port());
  client.Send(RawHttp::Get("/large"));
  still.Send(RawHttp::Get("/large"));
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"), StartsWith("HTTP/1.1 200"));
  size_t read = 0;
  for (size_t count = 1; read < TestHandler::kLargeBytes && count > 0; read += count) {
    absl::SleepFor(absl::Milliseconds(100));
    count = client.ReadBytes(std::min<size_t>(2 << 20, TestHandler::kLargeBytes - read)).size();
  }
  EXPECT_EQ(read, TestHandler::kLargeBytes);
  EXPECT_LT(still.ReadAll().size(), TestHandler::kLargeBytes);
  EXPECT_TRUE(still.closed_by_peer());
}

TEST_F(HttpServerTest, ConnectionsOverTheBoundAreTurnedAway) {
  HttpOptions options;
  options.connections_max = 2;
  Start(options);
  RawHttp a(server->port()), b(server->port());
  a.Send(RawHttp::Get("/echo"));
  b.Send(RawHttp::Get("/echo"));
  EXPECT_EQ(a.ReadResponse().status, 200);
  EXPECT_EQ(b.ReadResponse().status, 200);
  RawHttp c(server->port());
  EXPECT_EQ(c.ReadResponse().status, 503);
}

TEST_F(HttpServerTest, BodiesThatArriveAreBoundedTogether) {
  HttpOptions options;
  options.body_bytes_max = 1 << 20;
  options.reading_bytes_max = (3 << 19) - 2;  // not quite one and a half
  Start(options);
  const std::string body(1 << 20, 'a'), post = RawHttp::Post("/echo", body);
  const std::string chunked =
      "POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n80000\r\n" +
      std::string(0x80000, 'b') + "\r\n1\r\nb\r\n0\r\n\r\n";
  // Whoever comes last is turned away: the second, once the first has arrived but for its last byte.
  std::unique_ptr<RawHttp> first;
  int status = 0;
  for (int wait_ms = 100; status != 503 && wait_ms < 2000; wait_ms *= 2) {
    first = std::make_unique<RawHttp>(server->port());
    ASSERT_TRUE(first->Send(std::string_view(post).substr(0, post.size() - 1)));
    absl::SleepFor(absl::Milliseconds(wait_ms));
    status = Ask(post).status;
  }
  ASSERT_EQ(status, 503);
  EXPECT_EQ(Ask(RawHttp::Post("/echo", "small")).status, 200);
  EXPECT_EQ(Ask(chunked).status, 503);
  first->Send("a");
  EXPECT_EQ(first->ReadResponse().body.size(), body.size() + 5);
  EXPECT_EQ(Ask(post).status, 200);  // what was refused does not count any more
  EXPECT_EQ(Ask(chunked).status, 200);
}

TEST_F(HttpServerTest, ManyStreamsAtOnce) {
  Start();
  std::atomic<int> good{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back([&] {
      RawHttp client(server->port());
      for (int k = 0; k < 10; ++k) {
        client.Send(RawHttp::Get("/stream"));
        good += client.ReadResponse().body == "data: 0\n\ndata: 1\n\ndata: 2\n\n";
      }
    });
  }
  for (auto& c : clients) c.join();
  EXPECT_EQ(good, 80);
}

TEST_F(HttpServerTest, StoppingTellsProducersAndOutlivingRespondersAreHarmless) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold-stream"));
  client.ReadUntil("first");
  server.reset();
  EXPECT_TRUE(handler.gone.HasBeenNotified());
  EXPECT_FALSE(handler.held.back()->Write("late"));
  handler.held.back()->End();
  handler.held.clear();
}

TEST_F(HttpServerTest, TakenPortIsNamed) {
  Start();
  HttpOptions options;
  options.port = server->port();
  const auto second = HttpServer::Start(options, &handler);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(std::to_string(options.port)));
}

TEST_F(HttpServerTest, ListensOnNamesAndIpv6) {
  const bool ipv6 = CheckListen("--http", "[::1]:0").ok();
  for (const char* text : {"localhost:0", "0.0.0.0:0", "[::1]:0", "[::]:0"}) {
    const auto at = ParseHostPort("--http", text);
    ASSERT_TRUE(at.ok()) << at.status();
    if (at->first.find(':') != std::string::npos && !ipv6) continue;  // a machine without
    HttpOptions options;
    options.address = at->first;
    Start(options);
    const bool only6 = at->first == "::1";
    if (!only6) {
      EXPECT_EQ(Ask(RawHttp::Get("/echo")).body, "GET:") << text;
    }
    const auto dialled = ParseHostPort("--http", server->address());
    ASSERT_TRUE(dialled.ok()) << server->address();
    EXPECT_EQ(dialled->second, server->port());
    if (at->first != "0.0.0.0" && ipv6) {
      RawHttp client(server->port(), AF_INET6);
      // A machine may know localhost by one kind of address only.
      if (at->first == "localhost" && !client.connected()) continue;
      client.Send(RawHttp::Get("/echo"));
      EXPECT_EQ(client.ReadResponse().body, "GET:") << text;
    }
    EXPECT_EQ(RawHttp(server->port()).connected(), !only6) << text;
  }
}

TEST_F(HttpServerTest, DrainWaitsForAnswersAndTakesNothingNew) {
  Start();
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/hold"));
  const auto responder = handler.Held();
  EXPECT_FALSE(server->Drain(absl::Milliseconds(20)));
  EXPECT_FALSE(RawHttp(server->port()).connected());
  responder->Send({.status = 200, .content_type = "text/plain", .headers = {}, .body = "done"});
  EXPECT_TRUE(server->Drain(absl::Seconds(5)));
  EXPECT_EQ(client.ReadResponse().body, "done");
  client.Send(RawHttp::Get("/echo"));
  EXPECT_THAT(client.ReadResponse().head, HasSubstr("Connection: close"));
  EXPECT_EQ(client.ReadAll(), "");
  EXPECT_TRUE(client.closed_by_peer());
}

TEST(HttpOpsTest, HealthReadinessAndMetrics) {
  InitLog("test", LogLevel::kError);
  Metrics metrics(MetricLabels{{"role", "test"}});
  absl::Status ready = absl::UnavailableError("no worker");
  int refreshed = 0;
  HttpOps ops(
      &metrics, [&] { return ready; }, [&] { ++refreshed; });
  auto server = HttpServer::Start({}, &ops);
  ASSERT_TRUE(server.ok());
  RawHttp client((*server)->port());
  const auto ask = [&](const std::string& path) {
    client.Send(RawHttp::Get(path));
    return client.ReadResponse();
  };
  EXPECT_EQ(ask("/healthz").status, 200);
  EXPECT_EQ(ask("/readyz").status, 503);
  EXPECT_EQ(ask("/readyz").body, "no worker\n");
  ready = absl::OkStatus();
  EXPECT_EQ(ask("/readyz").status, 200);
  EXPECT_EQ(ask("/nothing").status, 404);
  CounterFollower follower(metrics.Counter("deltamesh_test_total", "A test."));
  follower.Set(3);
  follower.Set(5);
  const auto r = ask("/metrics");
  EXPECT_THAT(r.head, HasSubstr("text/plain; version=0.0.4"));
  EXPECT_THAT(r.body, HasSubstr("deltamesh_test_total{role=\"test\"} 5"));
  EXPECT_EQ(refreshed, 1);
  client.Send(RawHttp::Post("/metrics", ""));
  EXPECT_EQ(client.ReadResponse().status, 405);
}

}  // namespace
}  // namespace deltamesh
