// The thread of a router: what it hears, and when.
#include "services/router/router_server.h"

#include <atomic>
#include <deque>
#include <functional>

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

}  // namespace
}  // namespace deltamesh
