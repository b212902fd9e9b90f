// `deltamesh call` against a router with a scripted worker.
#include "services/cli/call.h"

#include <sstream>

#include "services/common/grpc_server.h"
#include "services/router/inference_service.h"
#include "tests/unit/services/fake_mesh.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

class CallTest : public ::testing::Test {
 protected:
  void SetUp() override {
    mesh.Join();
    service = std::make_unique<InferenceService>(mesh.front.get(), mesh.router.get(), &mesh.pool);
    auto started = GrpcServer::Start({}, {service.get()});
    ASSERT_TRUE(started.ok());
    server = *std::move(started);
  }
  absl::Status Call(const std::string& request) {
    return RunCall({.router = server->address(), .request = request, .seconds = 20}, out);
  }

  FakeMesh mesh;
  std::unique_ptr<InferenceService> service;
  std::unique_ptr<GrpcServer> server;
  std::ostringstream out;
};

TEST_F(CallTest, EventsAreJsonLines) {
  ASSERT_TRUE(Call(R"({"request_id": "mine", "text": "Hi", "stop": {"max_tokens": 40}})").ok());
  std::string text;
  std::istringstream lines(out.str());
  Json last;
  for (std::string line; std::getline(lines, line);) {
    last = Json::parse(line);
    EXPECT_EQ(last["request_id"], "mine");
    if (last.contains("delta")) text += last["delta"].value("text", "");
  }
  EXPECT_EQ(text, "Hello world");
  EXPECT_EQ(last["finish"]["reason"], "FINISH_REASON_STOP");
  EXPECT_GT(last["finish"]["usage"]["completion_tokens"], 1);
}

TEST_F(CallTest, WhatIsNoRequestIsSaidBeforeAnyCall) {
  for (const char* bad : {"", "{", "[]", R"({"txt": "Hi"})", R"({"text": 5.5})"}) {
    const absl::Status status = Call(bad);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("request: is no GenerateRequest")) << bad;
  }
  EXPECT_EQ(mesh.started().size(), 0u);
}

TEST_F(CallTest, TheRoutersErrorsAreShown) {
  const absl::Status status = Call(R"({"text": "Hi", "sampling": {"temperature": 3}})");
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("temperature: 3 is out of range"));
}

}  // namespace
}  // namespace deltamesh
