// The thread of a router: what it hears, and when.
#include "services/router/router_server.h"

#include <atomic>
#include <deque>
#include <functional>

#include "absl/synchronization/notification.h"
#include "tests/unit/services/fake_mesh.h"

namespace deltamesh {
namespace {

class JumpingClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::FromUnixNanos(nanos_); }
  void Advance(absl::Duration d) { nanos_ += absl::ToInt64Nanoseconds(d); }

 private:
  std::atomic<int64_t> nanos_ = absl::ToUnixNanos(absl::FromUnixSeconds(1'700'000'000));
};

// A network that is heard one event at a time, on the router's thread.
class Network {
 public:
  void Add(std::function<void()> event) {
    absl::MutexLock lock(&mu_);
    events_.push_back(std::move(event));
  }
  // Whether there was anything.
  bool Hear(absl::Duration wait) {
    std::function<void()> event;
    {
      absl::MutexLock lock(&mu_);
      if (!events_.empty()) {
        event = std::move(events_.front());
        events_.pop_front();
      }
    }
    if (event) {
      event();
    } else {
      absl::SleepFor(std::min(wait, absl::Milliseconds(1)));
    }
    return event != nullptr;
  }

 private:
  absl::Mutex mu_;
  std::deque<std::function<void()>> events_;
};

// The process stood still for an hour. What its workers said in that time waits in the sockets: nobody was
// silent.
TEST(RouterServerTest, AfterAPauseTheBacklogIsHeardBeforeAnybodyIsSilent) {
  InitLog("test", LogLevel::kError);
  JumpingClock clock;
  Metrics metrics(MetricLabels{{"role", "router"}});
  RouterServer router({}, &clock, &metrics);
  Network network;
  router.Start({.send = [](LinkId, const mesh::RouterMessage&) {},
                .close = [](LinkId, const absl::Status&) {}},
               {.wait = [&](absl::Duration wait) { return network.Hear(wait); }, .wake = [] {}});
  for (LinkId link = 1; link <= 2; ++link) {
    network.Add([&, link] {
      router.OnLinkOpened(link);
      router.OnLinkMessage(link, TestRegister("d" + std::to_string(link), mesh::ROLE_DECODE));
    });
  }
  const auto ask = [&](const std::function<int64_t(const RouterCore&)>& of) {
    std::atomic<int64_t> said = -1;
    router.Ask([&](const RouterCore* core) { said = core == nullptr ? 0 : of(*core); });
    CHECK(FakeMesh::Await([&] { return said >= 0; }));
    return said.load();
  };
  const auto workers = [](const RouterCore& core) { return core.gauges().decode_workers; };
  ASSERT_TRUE(FakeMesh::Await([&] { return ask(workers) == 2; }));
  std::atomic<bool> last = false;
  network.Add([&] {
    clock.Advance(absl::Hours(1));
    for (int i = 0; i <= 300; ++i) {
      network.Add([&, i] {
        mesh::WorkerMessage beat;
        beat.mutable_heartbeat()->set_slabs_free(4);
        router.OnLinkMessage(i < 300 ? 1 : 2, beat);
        last = i == 300;
      });
    }
  });
  ASSERT_TRUE(FakeMesh::Await([&] { return last.load(); }));
  EXPECT_EQ(ask(workers), 2);
  EXPECT_EQ(ask([](const RouterCore& core) {
              return static_cast<int64_t>(core.counters().leases_expired);
            }),
            0);
  // Those that said nothing are silent all the same.
  clock.Advance(absl::Hours(1));
  EXPECT_TRUE(FakeMesh::Await([&] { return ask(workers) == 0; }));
  router.Stop();
}

class EndSink final : public AnswerSink {
 public:
  void OnEvent(AnswerEvent) override {}
  void OnEnd(AnswerEnd end) override {
    answer = std::move(end);
    ended.Notify();
  }
  void OnError(const absl::Status& status) override {
    ADD_FAILURE() << status;
    ended.Notify();
  }
  absl::Notification ended;
  AnswerEnd answer;
};

// One message of a worker ends two turns of a session. When the first one's stop string is found, the second
// one's tokens are the session's already: they stay whole.
TEST(RouterServerTest, AStopStringCutsNoLaterTurnOfItsSession) {
  FakeMesh fake;
  fake.script = [](const mesh::StartDecode&) {
    Script silent;
    silent.end = false;
    return silent;
  };
  fake.Join();
  std::vector<std::shared_ptr<EndSink>> sinks;
  SessionId session;
  for (const size_t turn : {0u, 1u}) {
    GenerateSpec spec;
    spec.input = std::string("Count");
    spec.cache.set_session("s");
    if (turn == 0) spec.stop = {"three"};
    absl::StatusOr<PreparedRequest> prepared = fake.front->Prepare(std::move(spec));
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    session = prepared->request.session;
    sinks.push_back(std::make_shared<EndSink>());
    fake.router->Generate(*std::move(prepared), sinks.back());
    ASSERT_TRUE(FakeMesh::Await([&] { return fake.started().size() == turn + 1; }));
  }
  mesh::WorkerMessage both;
  for (const mesh::StartDecode& start : fake.started()) {
    mesh::SequenceOutput* o = both.mutable_outputs()->add_sequences();
    o->set_request_id(start.request_id());
    o->set_attempt(start.attempt());
    const bool first = both.outputs().sequences_size() == 1;
    for (const TokenId token : fake.Say(first ? "one two three" : "one two three four").tokens) {
      o->add_tokens(token);
    }
    o->set_end(mesh::SequenceOutput::STOP_TOKEN);
    o->add_tokens(fake.front->tokenizer().eos_ids().front());
  }
  fake.router->OnLinkMessage(FakeMesh::kLink, both);
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->ended.WaitForNotificationWithTimeout(absl::Seconds(5)));
  }
  EXPECT_EQ(sinks[0]->answer.stop_string, "three");
  EXPECT_LT(sinks[0]->answer.session_tokens, sinks[1]->answer.session_tokens);
  std::atomic<int64_t> tokens = -1;
  SessionCall call;
  call.id = "get";
  call.session = session;
  call.name = "s";
  fake.router->CallSession(std::move(call), [&](SessionAnswered answered) {
    EXPECT_TRUE(answered.status.ok()) << answered.status;
    tokens = answered.status.ok() ? static_cast<int64_t>(answered.state.tokens->size()) : 0;
  });
  ASSERT_TRUE(FakeMesh::Await([&] { return tokens >= 0; }));
  EXPECT_EQ(tokens, sinks[1]->answer.session_tokens);
}

}  // namespace
}  // namespace deltamesh
