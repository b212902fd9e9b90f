// The terminal client against a router with a scripted worker: input from a pipe, output to a string.
#include "services/cli/chat.h"

#include <unistd.h>

#include <csignal>
#include <sstream>

#include "services/cli/answer_rate.h"
#include "services/common/grpc_server.h"
#include "services/router/inference_service.h"
#include "tests/unit/services/fake_mesh.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ChatTest : public ::testing::Test {
 protected:
  explicit ChatTest(const RouterOptions& router = {}) : mesh("kimi_linear_tiny", router) {}

  void Start() {
    if (script) mesh.script = script;
    mesh.Join();
    service = std::make_unique<InferenceService>(mesh.front.get(), mesh.router.get(), &mesh.pool);
    auto started = GrpcServer::Start({}, {service.get()});
    ASSERT_TRUE(started.ok());
    server = *std::move(started);
    options.router = server->address();
    ASSERT_EQ(pipe(fds), 0);
  }
  void Type(const std::string& text) { ASSERT_GT(write(fds[1], text.data(), text.size()), 0); }
  int Run() {
    const int code = RunChat(options, fds[0], out, [this](absl::Duration wait) {
      absl::SleepFor(std::min(wait, absl::Milliseconds(5)));
      return signal.exchange(0);
    });
    close(fds[0]);
    return code;
  }

  FakeMesh mesh;
  std::function<Script(const mesh::StartDecode&)> script;
  std::unique_ptr<InferenceService> service;
  std::unique_ptr<GrpcServer> server;
  ChatOptions options;
  int fds[2] = {-1, -1};
  std::ostringstream out;
  std::atomic<int> signal = 0;
};

TEST_F(ChatTest, AnswersEachLineAndKeepsTheConversation) {
  Start();
  Type("Hi\n\nAnd again\n/reset\nHi\n");
  close(fds[1]);  // the end of the input leaves
  EXPECT_EQ(Run(), 0);
  EXPECT_THAT(out.str(), HasSubstr("tiny (kimi_linear, 2048 tokens of context)"));
  EXPECT_THAT(out.str(), HasSubstr("Hello world\n("));
  EXPECT_THAT(out.str(), HasSubstr("0 cached)"));
  EXPECT_THAT(out.str(), Not(HasSubstr("\033")));
  const auto started = mesh.started();
  ASSERT_EQ(started.size(), 3u);
  EXPECT_GT(started[1].prompt_size(), started[0].prompt_size());
  EXPECT_EQ(started[2].prompt_size(), started[0].prompt_size());
}

// Where an answer came in one burst, tokens by time would be millions a second.
TEST(AnswerRateTest, IsShownWhereTheTimeMeansSomething) {
  EXPECT_EQ(DescribeAnswerRate(11, absl::Seconds(2)), "5.0 tokens/s");
  EXPECT_EQ(DescribeAnswerRate(11, kAnswerRateMin), "100.0 tokens/s");
  EXPECT_EQ(DescribeAnswerRate(11, kAnswerRateMin - absl::Nanoseconds(1)), "");
  EXPECT_EQ(DescribeAnswerRate(1, absl::Seconds(2)), "");
}

TEST_F(ChatTest, TheRateOfASlowAnswerIsShown) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh.Say("Hello world");
    s.gap = absl::Milliseconds(50);
    return s;
  };
  Start();
  Type("first\n");
  close(fds[1]);
  EXPECT_EQ(Run(), 0);
  EXPECT_THAT(out.str(), HasSubstr(" tokens/s, first after"));
}

TEST_F(ChatTest, InterruptEndsTheAnswerAndNotTheProgram) {
  script = [this](const mesh::StartDecode& start) {
    Script s = mesh.Say("one two three");
    s.end = mesh.started().size() > 1;  // the first answer never ends by itself
    (void)start;
    return s;
  };
  Start();
  Type("first\n");
  std::thread user([&] {
    FakeMesh::Await([&] { return mesh.router->snapshot().gauges.live == 1; });
    absl::SleepFor(absl::Milliseconds(100));
    signal = SIGINT;
    FakeMesh::Await([&] { return mesh.cancelled_count() == 1; });
    Type("second\n/exit\n");
  });
  EXPECT_EQ(Run(), 0);
  user.join();
  close(fds[1]);
  EXPECT_THAT(out.str(), HasSubstr("one two three\n(cancelled after"));
  EXPECT_EQ(mesh.started().size(), 2u);
}

TEST_F(ChatTest, FailuresAreShownAndForgotten) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh.Say("x");
    if (mesh.started().size() == 1) s.refuse = absl::UnavailableError("planted");
    return s;
  };
  Start();
  Type("first\nsecond\n");
  close(fds[1]);
  EXPECT_EQ(Run(), 1);
  EXPECT_THAT(out.str(), HasSubstr("(failed: decode worker \"d1\": planted)"));
}

TEST_F(ChatTest, TerminationEndsAnIdleProgram) {
  Start();
  signal = SIGTERM;
  EXPECT_EQ(Run(), 0);
  close(fds[1]);
}

TEST_F(ChatTest, ASessionSendsOnlyWhatIsNewAndGoesOnLater) {
  mesh.with_store = true;
  options.session = "trip";
  options.system = "Be brief.";
  Start();
  Type("Hi\nAnd again\n/session\n/fork other\n/suspend\n/fork\n");
  close(fds[1]);
  EXPECT_EQ(Run(), 0);
  EXPECT_THAT(out.str(), HasSubstr("(session trip is new)"));
  EXPECT_THAT(out.str(), HasSubstr("(session other begins with the same "));
  EXPECT_THAT(out.str(), HasSubstr("bytes written to disk by d1; the next message resumes it)"));
  EXPECT_THAT(out.str(), HasSubstr("/fork NAME begins another"));
  const auto first = mesh.started();
  ASSERT_EQ(first.size(), 2u);
  const std::vector<int> before(first[0].prompt().begin(), first[0].prompt().end());
  EXPECT_GT(first[1].prompt_size(), first[0].prompt_size());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), first[1].prompt().begin()));
  EXPECT_THAT(out.str(), HasSubstr("--session trip goes on with it)"));
  // Another day.
  out.str("");
  ASSERT_EQ(pipe(fds), 0);
  Type("Third\n/reset\nHi\n");
  close(fds[1]);
  EXPECT_EQ(Run(), 0);
  EXPECT_THAT(out.str(), HasSubstr("(session trip goes on after "));
  EXPECT_THAT(out.str(), HasSubstr("no state is held"));
  EXPECT_THAT(out.str(), HasSubstr("(--system is left out: the session has begun; /reset begins"));
  const auto second = mesh.started();
  ASSERT_EQ(second.size(), 4u);
  EXPECT_TRUE(
      std::equal(second[1].prompt().begin(), second[1].prompt().end(), second[2].prompt().begin()));
  EXPECT_GT(second[2].prompt_size(), second[1].prompt_size());
  EXPECT_EQ(second[3].prompt_size(), second[0].prompt_size());
}

TEST_F(ChatTest, AMessageThatIsNotUtf8IsRefusedByName) {
  Start();
  Type("ab\xff\nHi\n");
  close(fds[1]);
  EXPECT_EQ(Run(), 1);
  EXPECT_THAT(out.str(), HasSubstr("(failed: byte 2 of the message is not UTF-8"));
  EXPECT_EQ(mesh.started().size(), 1u);
}

// The router still has the old conversation when the first message of the new one fails.
TEST_F(ChatTest, AResetHoldsWhenTheNextMessageFails) {
  options.session = "trip";
  script = [this](const mesh::StartDecode&) {
    Script s = mesh.Say("x");
    if (mesh.started().size() == 2) s.refuse = absl::UnavailableError("planted");
    return s;
  };
  Start();
  Type("Hi\n/reset\nfails\nHi\n");
  close(fds[1]);
  EXPECT_EQ(Run(), 1);
  EXPECT_THAT(out.str(), HasSubstr("planted"));
  const auto started = mesh.started();
  ASSERT_EQ(started.size(), 3u);
  EXPECT_EQ(started[2].prompt_size(), started[0].prompt_size());
}

TEST_F(ChatTest, ACutTurnOfASessionStaysAsFarAsItCame) {
  options.session = "trip";
  script = [this](const mesh::StartDecode&) {
    Script s = mesh.Say("one two three");
    s.end = mesh.started().size() > 1;
    return s;
  };
  Start();
  Type("first\n");
  std::thread user([&] {
    FakeMesh::Await([&] { return mesh.router->snapshot().gauges.live == 1; });
    absl::SleepFor(absl::Milliseconds(100));
    signal = SIGINT;
    FakeMesh::Await([&] { return mesh.cancelled_count() == 1; });
    Type("second\n");
    close(fds[1]);
  });
  EXPECT_EQ(Run(), 0);
  user.join();
  const auto started = mesh.started();
  ASSERT_EQ(started.size(), 2u);
  const auto said = mesh.Say("one two three").tokens;
  const auto& prompt = started[1].prompt();
  const auto at = prompt.begin() + started[0].prompt_size();
  EXPECT_TRUE(std::equal(started[0].prompt().begin(), started[0].prompt().end(), prompt.begin()))
      << started[0].prompt_size() << " " << started[1].prompt_size() << out.str();
  EXPECT_TRUE(std::equal(said.begin(), said.end(), at));
}

class FewSessionsChatTest : public ChatTest {
 protected:
  static RouterOptions One() {
    RouterOptions o;
    o.sessions_max = 1;
    return o;
  }
  FewSessionsChatTest() : ChatTest(One()) {}
};

// The router has the system message only as long as it has the session.
TEST_F(FewSessionsChatTest, ASessionThatIsGoneBeginsAnewWithTheSystemMessage) {
  options.session = "trip";
  options.system = "Be brief.";
  Start();
  Type("Hi\n/fork other\nAnd again\nHi\n");  // the fork takes the only place
  close(fds[1]);
  EXPECT_EQ(Run(), 1);
  EXPECT_THAT(out.str(), HasSubstr("(failed: session: \"trip\" is not known"));
  EXPECT_THAT(out.str(), HasSubstr("(session trip is not known to the router any more; the next "
                                   "message begins it anew)"));
  const auto started = mesh.started();
  ASSERT_EQ(started.size(), 2u);
  EXPECT_THAT(started[1].prompt(), ::testing::ElementsAreArray(started[0].prompt()));
}

TEST(ChatOptionsTest, UnreachableRouterIsNamed) {
  ChatOptions options;
  options.router = "127.0.0.1:1";
  std::ostringstream out;
  EXPECT_EQ(RunChat(options, 0, out,
                    [](absl::Duration wait) {
                      absl::SleepFor(wait);
                      return 0;
                    }),
            1);
  EXPECT_THAT(out.str(), HasSubstr("no router answers at 127.0.0.1:1"));
}

// Nothing is sent of a name that protobuf would refuse in its own words.
TEST_F(ChatTest, NamesThatAreNotUtf8AreRefusedHere) {
  options.session = "trip";
  Start();
  Type("/fork caf\xe9\n/fork caf\xc3\xa9\n");
  close(fds[1]);
  EXPECT_EQ(Run(), 0);
  EXPECT_THAT(out.str(),
              HasSubstr("(failed: /fork: byte 3 of the name is not UTF-8; use another)"));
  EXPECT_THAT(out.str(),
              HasSubstr("session: \"trip\" is not known"));  // asked: the other name is text
  out.str("");
  options.session = "caf\xe9";
  ASSERT_EQ(pipe(fds), 0);
  close(fds[1]);
  EXPECT_EQ(Run(), 1);
  EXPECT_THAT(out.str(),
              HasSubstr("(failed: --session: byte 3 of the name is not UTF-8; use another)"));
  out.str("");
  options.session = "trip";
  options.salt = "\xff";
  ASSERT_EQ(pipe(fds), 0);
  close(fds[1]);
  EXPECT_EQ(Run(), 1);
  EXPECT_THAT(out.str(), HasSubstr("(failed: --salt: byte 0 of"));
}

}  // namespace
}  // namespace deltamesh
