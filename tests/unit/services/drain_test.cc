// A router that drains: what it took is counted until its client has heard of the end.
#include <atomic>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "services/router/router_server.h"
#include "tests/unit/services/fake_mesh.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

class Sink final : public AnswerSink {
 public:
  explicit Sink(RouterServer* router) : router_(router) {}
  void OnEvent(AnswerEvent) override {}
  void OnEnd(AnswerEnd) override { Finish(absl::OkStatus()); }
  void OnError(const absl::Status& end) override { Finish(end); }

  absl::Notification ended;
  absl::Status status;
  int64_t unfinished_at_end = -1;

 private:
  void Finish(const absl::Status& end) {
    status = end;
    unfinished_at_end = router_->unfinished();
    ended.Notify();
  }
  RouterServer* const router_;
};

class DrainTest : public ::testing::Test {
 protected:
  std::shared_ptr<Sink> Ask(const std::string& id = "") {
    GenerateSpec spec;
    spec.request_id = id;
    spec.input = std::string("Hi");
    absl::StatusOr<PreparedRequest> prepared = mesh.front->Prepare(std::move(spec));
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    auto sink = std::make_shared<Sink>(mesh.router.get());
    last_id = prepared->request.request_id;
    mesh.router->Generate(*std::move(prepared), sink);
    return sink;
  }
  // The worker answers only once this is released.
  void HoldAnswers() {
    mesh.script = [this](const mesh::StartDecode&) {
      release.WaitForNotification();
      return mesh.Say("Hello");
    };
  }

  FakeMesh mesh;
  absl::Notification release;
  RequestId last_id;
};

TEST_F(DrainTest, CountsFromTheCallToTheLastWord) {
  HoldAnswers();
  mesh.Join();
  const auto first = Ask(), second = Ask();
  EXPECT_EQ(mesh.router->unfinished(), 2);  // at once, whatever the router's thread has seen
  mesh.router->Drain();
  const auto late = Ask();
  ASSERT_TRUE(late->ended.HasBeenNotified());
  EXPECT_TRUE(absl::IsUnavailable(late->status));
  EXPECT_THAT(std::string(late->status.message()), HasSubstr("the router is draining"));
  EXPECT_EQ(mesh.router->unfinished(), 2);
  release.Notify();
  for (const auto& sink : {first, second}) {
    ASSERT_TRUE(sink->ended.WaitForNotificationWithTimeout(absl::Seconds(5)));
    EXPECT_TRUE(sink->status.ok()) << sink->status;
    EXPECT_GE(sink->unfinished_at_end, 1);  // itself: the last word was not said yet
  }
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh.router->unfinished() == 0; }));
}

TEST_F(DrainTest, RefusedAndCancelledRequestsAreOverToo) {
  const auto refused = Ask();  // no worker
  ASSERT_TRUE(refused->ended.WaitForNotificationWithTimeout(absl::Seconds(5)));
  EXPECT_FALSE(refused->status.ok());
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh.router->unfinished() == 0; }));
  HoldAnswers();
  mesh.Join();
  Ask();
  mesh.router->Cancel(last_id);
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh.router->unfinished() == 0; }));
  const auto cut = Ask();
  release.Notify();
  mesh.router->Stop();
  EXPECT_TRUE(cut->ended.HasBeenNotified());
  EXPECT_EQ(mesh.router->unfinished(), 0);
}

// Names are the client's business: several requests may share one, at once or one after the other.
TEST_F(DrainTest, RequestsOfOneNameDoNotMeet) {
  HoldAnswers();
  mesh.Join();
  const auto first = Ask("same");
  const RequestId first_id = last_id;
  EXPECT_THAT(first_id, ::testing::StartsWith("same/"));
  const auto second = Ask("same");
  EXPECT_NE(last_id, first_id);
  mesh.router->Cancel(first_id);
  release.Notify();
  ASSERT_TRUE(second->ended.WaitForNotificationWithTimeout(absl::Seconds(5)));
  EXPECT_TRUE(second->status.ok()) << second->status;
  EXPECT_FALSE(first->ended.HasBeenNotified());
}

// What waits for the router's thread as it stops, and what comes after, is told by name all the same.
TEST_F(DrainTest, WhoComesAsTheRouterStopsIsInTheLog) {
  InitLog("test", LogLevel::kInfo);
  ::testing::internal::CaptureStderr();
  absl::Notification busy, go_on;
  mesh.router->Ask([&](const RouterCore*) {
    busy.Notify();
    go_on.WaitForNotification();
  });
  busy.WaitForNotification();
  const auto refuse = [&](const std::string& id) {
    mesh.router->NoteRefusal(
        {.request_id = id,
         .trace = {.trace_id = "the-trace", .parent_id = "the-parent", .span_id = "span-" + id},
         .status = absl::InvalidArgumentError("no such thing")});
  };
  refuse("turned-away");
  const auto sink = Ask("late");
  std::thread stop([&] { mesh.router->Stop(); });
  const auto closed = std::make_shared<std::atomic<bool>>(false);
  EXPECT_TRUE(FakeMesh::Await([&] {
    mesh.router->Ask([closed](const RouterCore* core) { *closed = core == nullptr; });
    return closed->load();
  }));
  go_on.Notify();
  stop.join();
  refuse("after");
  const std::string log = ::testing::internal::GetCapturedStderr();
  InitLog("test", LogLevel::kError);
  EXPECT_TRUE(sink->ended.HasBeenNotified());
  EXPECT_EQ(sink->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(mesh.router->unfinished(), 0);
  std::map<std::string, std::string> lines;  // of refusals, by their requests
  std::istringstream in(log);
  for (std::string line; std::getline(in, line);) {
    if (line.find("request.refused") == line.npos) continue;
    for (const char* id : {"turned-away", "late/", "after"}) {
      if (line.find(id) != line.npos) lines[id] = line;
    }
  }
  EXPECT_EQ(lines.size(), 3u) << log;
  EXPECT_THAT(lines["late/"], HasSubstr("stopping"));
  for (const std::string id : {"turned-away", "after"}) {
    EXPECT_THAT(lines[id], HasSubstr("span-" + id));
    for (const char* field : {"the-trace", "the-parent", "INVALID_ARGUMENT", "no such thing"}) {
      EXPECT_THAT(lines[id], HasSubstr(field));
    }
  }
}

}  // namespace
}  // namespace deltamesh
