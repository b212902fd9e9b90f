// A gRPC port: calls of all kinds end as they should, with a thread of its own and with a lent one.
#include "services/common/grpc_server.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "grpcpp/generic/generic_stub.h"
#include "health/v1/health.grpc.pb.h"
#include "reflection/v1alpha/reflection.grpc.pb.h"

namespace deltamesh {
namespace {

using Health = grpc::health::v1::Health;
using HealthState = grpc::health::v1::HealthCheckResponse;
using Reflection = grpc::reflection::v1alpha::ServerReflection;
using ReflectionRequest = grpc::reflection::v1alpha::ServerReflectionRequest;
using ReflectionResponse = grpc::reflection::v1alpha::ServerReflectionResponse;

// Says back what it hears, as often as it is told to; holds calls of "Hold" until they are cancelled.
class EchoService final : public GrpcService {
 public:
  std::string_view name() const override { return "test.Echo"; }
  std::shared_ptr<GrpcCall::Events> Take(std::string_view method,
                                         const std::shared_ptr<GrpcCall>& call) override {
    if (method == "Hold") {
      return std::make_shared<OneRequest>(
          call, [this](const grpc::ByteBuffer&) { held.Notify(); }, [this] { cancelled.Notify(); });
    }
    if (method == "Flood") return std::make_shared<Flood>(call, &flooded);
    if (method != "Thrice") return nullptr;
    return std::make_shared<OneRequest>(call, [call](const grpc::ByteBuffer& bytes) {
      const auto request = ParseRequest<grpc::health::v1::HealthCheckRequest>(bytes);
      if (!request.ok()) {
        return call->Finish({static_cast<grpc::StatusCode>(request.status().code()),
                             std::string(request.status().message())});
      }
      for (int i = 0; i < 3; ++i) call->Write(*request, 10);
      call->Finish({grpc::StatusCode::OUT_OF_RANGE, "that was all"}, {{"left", "none"}});
      EXPECT_EQ(call->Write(*request, 10), GrpcCall::Written::kOver);
    });
  }

  // Writes until nothing more is taken, then has enough of the client.
  class Flood final : public GrpcCall::Events {
   public:
    Flood(std::shared_ptr<GrpcCall> call, absl::Notification* done)
        : call_(std::move(call)), done_(done) {
      grpc::health::v1::HealthCheckRequest much;
      much.set_service(std::string(1 << 20, 'x'));
      while (call_->Write(much, 10) == GrpcCall::Written::kQueued) {
      }
      call_->Abort({grpc::StatusCode::RESOURCE_EXHAUSTED, "it reads nothing"});
    }
    void OnMessage(const grpc::ByteBuffer&) override {}
    void OnMessagesEnd() override {}
    void OnDone() override { done_->Notify(); }

   private:
    const std::shared_ptr<GrpcCall> call_;
    absl::Notification* const done_;
  };

  absl::Notification held, cancelled, flooded;
};

class GrpcServerTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    GrpcServerOptions options;
    options.health_names = {"one"};
    options.own_thread = GetParam();
    server_ = GrpcServer::Start(options, {&echo_}).value();
    if (!GetParam()) {
      lent_ = std::thread([this] {
        while (!stop_) server_->Poll(absl::Seconds(60));
      });
    }
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
  }
  void TearDown() override { Stop(absl::ZeroDuration()); }
  void Stop(absl::Duration grace) {
    stop_ = true;
    if (lent_.joinable()) {
      server_->Wake();  // from its minute of waiting
      lent_.join();
    }
    server_->Shutdown(grace);
  }

  EchoService echo_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::atomic<bool> stop_ = false;
  std::thread lent_;
};

// A call of any method with one request.
struct RawCall {
  RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
          const std::string& bytes)
      : stub(channel) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    stream = stub.PrepareCall(&context, method, &queue);
    stream->StartCall(nullptr);
    Wait();
    const grpc::Slice slice(bytes);
    stream->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    Wait();
  }
  bool Wait() {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  }
  // All answers, then the end.
  std::vector<std::string> Read() {
    std::vector<std::string> answers;
    for (;;) {
      grpc::ByteBuffer bytes;
      stream->Read(&bytes, nullptr);
      if (!Wait()) break;
      std::vector<grpc::Slice> slices;
      EXPECT_TRUE(bytes.Dump(&slices).ok());
      std::string& all = answers.emplace_back();
      for (const grpc::Slice& s : slices) {
        all.append(reinterpret_cast<const char*>(s.begin()), s.size());
      }
    }
    stream->Finish(&status, nullptr);
    Wait();
    return answers;
  }

  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  grpc::GenericStub stub;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
  grpc::Status status;
};

TEST_P(GrpcServerTest, WritesLeaveInOrderBeforeTheEnd) {
  const std::string request = "\x0a\x03sum";
  RawCall call(channel_, "/test.Echo/Thrice", request);
  EXPECT_EQ(call.Read(), (std::vector<std::string>{request, request, request}));
  EXPECT_EQ(call.status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(call.status.error_message(), "that was all");
  const auto& trailing = call.context.GetServerTrailingMetadata();
  ASSERT_EQ(trailing.count("left"), 1u);
  EXPECT_EQ(trailing.find("left")->second, "none");
}

TEST_P(GrpcServerTest, WhatIsNotServedOrNotUnderstoodIsRefused) {
  // A name of 0x11170 bytes, more than a small request has.
  const std::string long_name = "\x0a\xf0\xa2\x04" + std::string(0x11170, 'n');
  for (const auto& [method, bytes, code] :
       {std::tuple("/test.Echo/Never", "", grpc::StatusCode::UNIMPLEMENTED),
        std::tuple("/test.Other/Thrice", "", grpc::StatusCode::UNIMPLEMENTED),
        std::tuple("/Thrice", "", grpc::StatusCode::UNIMPLEMENTED),
        std::tuple("/test.Echo/Thrice", "\xff\xff", grpc::StatusCode::INVALID_ARGUMENT),
        std::tuple("/grpc.health.v1.Health/Check", "\xff", grpc::StatusCode::INVALID_ARGUMENT),
        std::tuple("/grpc.health.v1.Health/Check", long_name.c_str(),
                   grpc::StatusCode::INVALID_ARGUMENT)}) {
    RawCall call(channel_, method, bytes);
    EXPECT_TRUE(call.Read().empty()) << method;
    EXPECT_EQ(call.status.error_code(), code) << method;
  }
}

TEST_P(GrpcServerTest, HealthOfEachNameCanBeWatched) {
  const auto stub = Health::NewStub(channel_);
  grpc::health::v1::HealthCheckRequest request;
  HealthState state;
  request.set_service("nobody");
  {
    grpc::ClientContext context;
    EXPECT_EQ(stub->Check(&context, request, &state).error_code(), grpc::StatusCode::NOT_FOUND);
  }
  grpc::ClientContext context;
  request.set_service("one");
  const auto watch = stub->Watch(&context, request);
  ASSERT_TRUE(watch->Read(&state));
  EXPECT_EQ(state.status(), HealthState::NOT_SERVING);
  server_->SetServing(true);
  ASSERT_TRUE(watch->Read(&state));
  EXPECT_EQ(state.status(), HealthState::SERVING);
  grpc::ClientContext other;
  request.set_service("nobody");
  const auto unknown = stub->Watch(&other, request);
  ASSERT_TRUE(unknown->Read(&state));
  EXPECT_EQ(state.status(), HealthState::SERVICE_UNKNOWN);
  other.TryCancel();
  // A watcher does not hold up the end.
  const absl::Time begin = absl::Now();
  Stop(absl::Seconds(20));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  EXPECT_FALSE(watch->Read(&state));
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_P(GrpcServerTest, ReflectionKnowsServicesAndTheirFiles) {
  grpc::ClientContext context;
  const auto stream = Reflection::NewStub(channel_)->ServerReflectionInfo(&context);
  const auto ask = [&](const ReflectionRequest& request) {
    ReflectionResponse response;
    EXPECT_TRUE(stream->Write(request) && stream->Read(&response));
    return response;
  };
  ReflectionRequest request;
  request.set_list_services("");
  std::vector<std::string> names;
  const ReflectionResponse listed = ask(request);
  for (const auto& service : listed.list_services_response().service()) {
    names.push_back(service.name());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"test.Echo", "grpc.health.v1.Health",
                                             "grpc.reflection.v1alpha.ServerReflection"}));
  for (const std::string& symbol : {names[1], names[2]}) {
    request.set_file_containing_symbol(symbol);
    EXPECT_EQ(ask(request).file_descriptor_response().file_descriptor_proto_size(), 1) << symbol;
  }
  request.set_file_by_filename("health/v1/health.proto");
  const ReflectionResponse file = ask(request);
  ASSERT_EQ(file.file_descriptor_response().file_descriptor_proto_size(), 1);
  EXPECT_NE(file.file_descriptor_response().file_descriptor_proto(0).find("HealthCheckRequest"),
            std::string::npos);
  request.set_file_containing_symbol("no.Such");
  EXPECT_EQ(ask(request).error_response().error_code(), grpc::StatusCode::NOT_FOUND);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_P(GrpcServerTest, CancelledCallsAreToldAndShutdownCancelsTheRest) {
  {
    RawCall call(channel_, "/test.Echo/Hold", "");
    echo_.held.WaitForNotification();
    call.context.TryCancel();
    EXPECT_TRUE(call.Read().empty());
    EXPECT_EQ(call.status.error_code(), grpc::StatusCode::CANCELLED);
    EXPECT_TRUE(echo_.cancelled.WaitForNotificationWithTimeout(absl::Seconds(10)));
  }
  grpc::ClientContext context;
  const auto stream = Reflection::NewStub(channel_)->ServerReflectionInfo(&context);
  ReflectionRequest request;
  ReflectionResponse response;
  request.set_list_services("");
  ASSERT_TRUE(stream->Write(request) && stream->Read(&response));
  Stop(absl::Milliseconds(100));
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_P(GrpcServerTest, AClientThatReadsNothingIsGivenUp) {
  RawCall call(channel_, "/test.Echo/Flood", "");
  EXPECT_TRUE(echo_.flooded.WaitForNotificationWithTimeout(absl::Seconds(10)));
  call.Read();
  EXPECT_FALSE(call.status.ok());
}

INSTANTIATE_TEST_SUITE_P(Threads, GrpcServerTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Own" : "Lent"; });

// A field of two bytes becomes an object of a hundred: too many are refused before that.
TEST(MessageFieldsTest, AreCountedBeforeTheyAreParsed) {
  const auto many = [](int64_t count) {
    std::string bytes;
    for (int64_t i = 0; i < count; ++i) bytes.append("\x0a\0", 2);  // an empty string, field 1
    return bytes;
  };
  const auto parse = [](const std::string& bytes) {
    const grpc::Slice slice(bytes);
    return ParseRequest<grpc::health::v1::HealthCheckRequest>(grpc::ByteBuffer(&slice, 1)).status();
  };
  EXPECT_TRUE(parse(many(kRequestFieldsMax)).ok());
  EXPECT_EQ(parse(many(kRequestFieldsMax + 1)).message(),
            "request: more than 1048576 fields; send fewer messages or entries");
  // Those of messages within count: 20 entries of list_services_response.
  const std::string within = std::string("\x32\x28") + many(20);
  const auto few = [](const std::string& bytes, int64_t most) {
    google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
    return HasFewFields(&stream, ReflectionResponse::descriptor(), most);
  };
  EXPECT_TRUE(few(within, 21));
  EXPECT_FALSE(few(within, 20));
  EXPECT_TRUE(few("\x32\x7f" + many(20), 21)) << "cut short: no such message";
}

}  // namespace
}  // namespace deltamesh
