// A gRPC port that nghttp2 serves, by clients that do what gRPC's own library never would: bytes by hand.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "health/v1/health.pb.h"
#include "services/common/grpc_server.h"
#include "services/common/grpc_wire.h"

namespace deltamesh {
namespace {

using Message = grpc::health::v1::HealthCheckRequest;

// Counts what it is sent and says nothing until it has been told everything; "Gather" reads on, "One" reads
// one message only and answers with as many as it is asked for.
class CountingService final : public GrpcService {
 public:
  std::string_view name() const override { return "test.Count"; }
  std::shared_ptr<GrpcCall::Events> Take(std::string_view method,
                                         const std::shared_ptr<GrpcCall>& call) override {
    return std::make_shared<Counter>(this, call, method == "Gather");
  }

  class Counter final : public GrpcCall::Events {
   public:
    Counter(CountingService* all, std::shared_ptr<GrpcCall> call, bool on)
        : all_(all), call_(std::move(call)), on_(on) {
      call_->Read();
    }
    void OnMessage(std::string_view bytes) override {
      Message message;
      ASSERT_TRUE(ParseBytes(bytes, &message));
      ++all_->messages;
      all_->bytes += static_cast<int64_t>(message.service().size());
      if (on_) return call_->Read();
      const int answers = std::stoi("0" + message.service());
      for (int i = 0; i < answers; ++i) {
        message.set_service(std::to_string(i));
        call_->Write(message, 1 << 20);
      }
      if (answers > 0) call_->Finish(grpc::Status::OK);
    }
    void OnMessagesEnd() override {
      if (on_) call_->Finish({grpc::StatusCode::OUT_OF_RANGE, "all\ntold"});
    }
    void OnCancelled() override { ++all_->cancelled; }
    void OnDone() override { ++all_->done; }

   private:
    CountingService* const all_;
    const std::shared_ptr<GrpcCall> call_;
    const bool on_;
  };

  std::atomic<int64_t> messages = 0, bytes = 0, cancelled = 0, done = 0;
};

class Http2PortTest : public ::testing::Test {
 protected:
  void SetUp() override {
    GrpcServerOptions options;
    options.engine = GrpcOverHttp2();
    options.message_bytes_max = 1 << 20;
    options.keepalive_time = absl::Milliseconds(500);
    options.keepalive_timeout = absl::Milliseconds(500);
    server_ = GrpcServer::Start(options, {&service_}).value();
  }

  CountingService service_;
  std::unique_ptr<GrpcServer> server_;
};

// An HTTP/2 client with nghttp2 for its frames, so that it can send odd pieces.
class Client {
 public:
  explicit Client(int port) {
    socket_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<uint16_t>(port));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected = ::connect(socket_, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0;
    const timeval limit{.tv_sec = 10, .tv_usec = 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    nghttp2_session_callbacks* c = nullptr;
    nghttp2_session_callbacks_new(&c);
    nghttp2_session_callbacks_set_on_header_callback(
        c, [](nghttp2_session*, const nghttp2_frame* f, const uint8_t* n, size_t nl,
              const uint8_t* v, size_t vl, uint8_t, void* user) {
          static_cast<Client*>(user)->streams[f->hd.stream_id].headers.insert_or_assign(
              std::string(reinterpret_cast<const char*>(n), nl),
              std::string(reinterpret_cast<const char*>(v), vl));
          return 0;
        });
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(
        c, [](nghttp2_session*, uint8_t, int32_t id, const uint8_t* b, size_t n, void* user) {
          static_cast<Client*>(user)->streams[id].data.append(reinterpret_cast<const char*>(b), n);
          return 0;
        });
    nghttp2_session_callbacks_set_on_stream_close_callback(
        c, [](nghttp2_session*, int32_t id, uint32_t code, void* user) {
          auto& s = static_cast<Client*>(user)->streams[id];
          s.closed = true;
          s.code = code;
          return 0;
        });
    nghttp2_session_client_new(&session_, c, this);
    nghttp2_session_callbacks_del(c);
    nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, nullptr, 0);
  }
  ~Client() {
    nghttp2_session_del(session_);
    ::close(socket_);
  }

  struct Stream {
    std::map<std::string, std::string> headers;
    std::string data;
    bool closed = false;
    uint32_t code = 0;
    std::string body;  // to send
    bool end = true;   // after it
  };

  int32_t Ask(const std::string& path, std::string body, bool end = true,
              std::vector<std::pair<std::string, std::string>> more = {}) {
    std::vector<std::pair<std::string, std::string>> fields = {
        {":method", "POST"}, {":scheme", "http"}, {":path", path},
        {":authority", "a"}, {"te", "trailers"},  {"content-type", "application/grpc"}};
    for (auto& field : more) {
      const bool odd = field.first == ":method" || field.first == "content-type";
      if (!odd) fields.push_back(field);
      for (auto& [name, value] : fields) {
        if (name == field.first) value = field.second;
      }
    }
    std::vector<nghttp2_nv> nv;
    for (auto& [name, value] : fields) {
      nv.push_back({reinterpret_cast<uint8_t*>(name.data()),
                    reinterpret_cast<uint8_t*>(value.data()), name.size(), value.size(),
                    NGHTTP2_NV_FLAG_NONE});
    }
    nghttp2_data_provider data;
    data.source.ptr = this;
    data.read_callback = [](nghttp2_session*, int32_t id, uint8_t* out, size_t most,
                            uint32_t* flags, nghttp2_data_source*, void* user) -> ssize_t {
      Stream& s = static_cast<Client*>(user)->streams[id];
      const size_t n = std::min(most, s.body.size());
      s.body.copy(reinterpret_cast<char*>(out), n);
      s.body.erase(0, n);
      if (!s.body.empty()) return static_cast<ssize_t>(n);
      if (s.end) *flags |= NGHTTP2_DATA_FLAG_EOF;
      if (n == 0 && !s.end) return NGHTTP2_ERR_DEFERRED;
      return static_cast<ssize_t>(n);
    };
    const int32_t id =
        nghttp2_submit_request(session_, nullptr, nv.data(), nv.size(), &data, nullptr);
    streams[id].body = std::move(body);
    streams[id].end = end;
    Send();
    return id;
  }
  // More of a body that has no end yet.
  void More(int32_t id, std::string body, bool end) {
    streams[id].body = std::move(body);
    streams[id].end = end;
    nghttp2_session_resume_data(session_, id);
    Send();
  }
  void Cancel(int32_t id) {
    nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, NGHTTP2_CANCEL);
    Send();
  }
  void Raw(std::string_view bytes) {
    (void)!::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void Send() {
    const uint8_t* bytes = nullptr;
    for (ssize_t n = 0; (n = nghttp2_session_mem_send(session_, &bytes)) > 0;) {
      Raw({reinterpret_cast<const char*>(bytes), static_cast<size_t>(n)});
    }
  }
  // Until the stream is closed; false when the connection is before.
  bool Await(int32_t id) {
    return AwaitThat([&] { return streams[id].closed; });
  }
  template <typename Done>
  bool AwaitThat(Done done) {
    while (!done()) {
      uint8_t buffer[4096];
      const ssize_t n = ::recv(socket_, buffer, sizeof(buffer), 0);
      if (n <= 0) return false;
      if (nghttp2_session_mem_recv(session_, buffer, static_cast<size_t>(n)) != n) return false;
      if (answer_) Send();
    }
    return true;
  }
  // Pings of the server are not answered any more.
  void FallSilent() { answer_ = false; }

  bool connected = false;
  std::map<int32_t, Stream> streams;

 private:
  int socket_ = -1;
  bool answer_ = true;
  nghttp2_session* session_ = nullptr;
};

std::string Wire(const std::string& service) {
  Message message;
  message.set_service(service);
  return GrpcMessage(message);
}

void AwaitCount(const std::atomic<int64_t>& count, int64_t value) {
  for (int i = 0; i < 1000 && count < value; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(count, value);
}

TEST_F(Http2PortTest, MessagesMayComeInAnyPieces) {
  Client client(server_->port());
  std::string all;
  int64_t bytes = 0;
  for (int i = 0; i < 40; ++i) {
    bytes += i * 37;
    all += Wire(std::string(static_cast<size_t>(i * 37), 'a'));
  }
  const int32_t id = client.Ask("/test.Count/Gather", all.substr(0, 1), /*end=*/false);
  for (size_t at = 1; at < all.size();) {
    const size_t piece = 1 + (at * 7919) % 113;
    const bool last = at + piece >= all.size();
    client.More(id, all.substr(at, piece), last);
    at += piece;
  }
  ASSERT_TRUE(client.Await(id));
  EXPECT_EQ(service_.messages, 40);
  EXPECT_EQ(service_.bytes, bytes);
  EXPECT_EQ(client.streams[id].headers["grpc-status"], "11");
  EXPECT_EQ(client.streams[id].headers["grpc-message"], "all%0Atold");
  AwaitCount(service_.done, 1);
  EXPECT_EQ(service_.cancelled, 0);
}

TEST_F(Http2PortTest, AnswersComeInOrderHoweverManyWait) {
  Client client(server_->port());
  const int32_t id = client.Ask("/test.Count/One", Wire("30000"));
  ASSERT_TRUE(client.Await(id));
  std::string expected;
  for (int i = 0; i < 30000; ++i) expected += Wire(std::to_string(i));
  EXPECT_EQ(client.streams[id].data, expected);
  EXPECT_EQ(client.streams[id].headers["grpc-status"], "0");
}

TEST_F(Http2PortTest, WhatIsNoCallOfThisServerIsRefused) {
  Client client(server_->port());
  const auto header = [&](int32_t id, const char* name) {
    EXPECT_TRUE(client.Await(id));
    return client.streams[id].headers[name];
  };
  EXPECT_EQ(header(client.Ask("/test.Count/One", "", true, {{":method", "GET"}}), ":status"),
            "405");
  EXPECT_EQ(
      header(client.Ask("/test.Count/One", "", true, {{"content-type", "text/plain"}}), ":status"),
      "415");
  EXPECT_EQ(header(client.Ask("/x", ""), "grpc-status"), "12");
  EXPECT_EQ(header(client.Ask("/test.Count/One", std::string("\1\0\0\0\0", 5)), "grpc-status"),
            "12");
  EXPECT_EQ(header(client.Ask("/test.Count/One", std::string("\0\0\x20\0\0", 5)), "grpc-status"),
            "8");
  EXPECT_EQ(
      header(client.Ask("/test.Count/One", "", true, {{"grpc-timeout", "soon"}}), "grpc-status"),
      "13");
  const int32_t much = client.Ask("/test.Count/One", "", true, {{"much", std::string(20000, 'm')}});
  EXPECT_TRUE(client.Await(much));
  EXPECT_NE(client.streams[much].code, 0u);
  EXPECT_EQ(service_.messages, 0);
  // The connection took no harm.
  EXPECT_EQ(header(client.Ask("/test.Count/One", Wire("1")), "grpc-status"), "0");
}

TEST_F(Http2PortTest, ADeadlineEndsACallAndSoDoesItsClient) {
  Client client(server_->port());
  const int32_t late = client.Ask("/test.Count/One", Wire(""), true, {{"grpc-timeout", "50m"}});
  ASSERT_TRUE(client.Await(late));
  EXPECT_EQ(client.streams[late].headers["grpc-status"], "4");
  AwaitCount(service_.done, 1);
  EXPECT_EQ(service_.cancelled, 1);
  const int32_t left = client.Ask("/test.Count/One", Wire(""));
  AwaitCount(service_.messages, 2);
  client.Cancel(left);
  AwaitCount(service_.done, 2);
  EXPECT_EQ(service_.cancelled, 2);
  {
    Client gone(server_->port());
    gone.Ask("/test.Count/Gather", Wire(""), /*end=*/false);
    AwaitCount(service_.messages, 3);
  }
  AwaitCount(service_.done, 3);
  EXPECT_EQ(service_.cancelled, 3);
}

TEST_F(Http2PortTest, AClientThatSendsMoreThanIsReadIsHeldUp) {
  Client client(server_->port());
  // One message is taken; of the rest, 8 MiB, no more than a window may come.
  std::string much = Wire("");
  for (int i = 0; i < 16; ++i) much += Wire(std::string(512 << 10, 'z'));
  const int32_t id = client.Ask("/test.Count/One", much);
  AwaitCount(service_.messages, 1);
  client.AwaitThat([&] { return client.streams[id].body.size() < much.size() - (512 << 10); });
  absl::SleepFor(absl::Milliseconds(300));
  client.Send();
  EXPECT_GT(client.streams[id].body.size(), 6u << 20);
  EXPECT_EQ(service_.messages, 1);
  // Another call of the connection has its share still.
  const int32_t other = client.Ask("/test.Count/One", Wire("2"));
  ASSERT_TRUE(client.Await(other));
  EXPECT_EQ(client.streams[other].data, Wire("0") + Wire("1"));
}

TEST_F(Http2PortTest, SilentAndBrokenConnectionsAreClosed) {
  Client silent(server_->port());
  silent.Ask("/test.Count/Gather", Wire(""), /*end=*/false);
  AwaitCount(service_.messages, 1);
  silent.FallSilent();
  const absl::Time begin = absl::Now();
  EXPECT_FALSE(silent.AwaitThat([] { return false; }));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  AwaitCount(service_.done, 1);
  Client broken(server_->port());
  broken.Ask("/test.Count/Gather", Wire(""), /*end=*/false);
  AwaitCount(service_.messages, 2);
  broken.Raw(std::string(64, '\xff'));  // a frame of 16 MiB
  EXPECT_FALSE(broken.AwaitThat([] { return false; }));
  AwaitCount(service_.done, 2);
  EXPECT_EQ(service_.cancelled, 2);
  Client stranger(server_->port());
  stranger.Raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_FALSE(stranger.AwaitThat([] { return false; }));
}

}  // namespace
}  // namespace deltamesh
