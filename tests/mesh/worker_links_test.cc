// Membership as a worker sees it: registering, heartbeats at each router's pace, one view out of many.
#include "services/worker/worker_links.h"

#include <gtest/gtest.h>

#include "absl/strings/str_format.h"

namespace deltamesh {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1000);

mesh::Registered Accepted(uint32_t heartbeat_ms) {
  mesh::Registered message;
  message.set_heartbeat_ms(heartbeat_ms);
  return message;
}

mesh::MeshView View(uint64_t epoch, const std::vector<std::pair<std::string, uint64_t>>& shards) {
  mesh::MeshView view;
  view.set_epoch(epoch);
  for (const auto& [name, shard_epoch] : shards) {
    mesh::ExpertPeer* peer = view.add_experts();
    peer->set_name(name);
    peer->set_epoch(shard_epoch);
  }
  return view;
}

std::string Names(const std::optional<mesh::MeshView>& view) {
  if (!view) return "unchanged";
  std::string out;
  for (const auto& peer : view->experts()) {
    out += peer.name() + "@" + std::to_string(peer.epoch()) + " ";
  }
  return out;
}

TEST(WorkerLinks, RegistersOnEveryLinkAndBeatsAtEachRoutersPace) {
  mesh::Register registration;
  registration.set_name("w");
  WorkerLinks links(registration);
  links.Open(1);
  links.Open(2);
  auto out = links.Take();
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].message.register_().name(), "w");
  EXPECT_FALSE(links.registered());
  links.Tick({}, kStart);
  EXPECT_TRUE(links.Take().empty());

  links.OnRegistered(1, Accepted(100), kStart);
  links.OnRegistered(2, Accepted(300), kStart);
  EXPECT_TRUE(links.registered());
  int beats[3] = {};
  for (int ms = 0; ms < 600; ms += 20) {
    links.Tick({}, kStart + absl::Milliseconds(ms));
    for (const auto& action : links.Take()) ++beats[action.link];
  }
  EXPECT_EQ(beats[1], 6);
  EXPECT_EQ(beats[2], 2);
  links.Close(1);
  links.Close(2);
  EXPECT_FALSE(links.registered());
}

TEST(WorkerLinks, SaysTheSameLoadFourTimesWithinALease) {
  WorkerLinks links({});
  links.Open(1);
  mesh::Registered accepted = Accepted(250);
  accepted.set_lease_ms(4000);
  absl::Time now = absl::UnixEpoch();
  links.OnRegistered(1, accepted, now);
  links.Take();
  const auto beats = [&](const mesh::Heartbeat& load, int ticks) {
    size_t sent = 0;
    for (int i = 0; i < ticks; ++i, now += absl::Milliseconds(50)) {
      links.Tick(load, now);
      sent += links.Take().size();
    }
    return sent;
  };
  mesh::Heartbeat load;
  EXPECT_EQ(beats(load, 80), 4u);
  for (int i = 1; i <= 4; ++i) {
    load.set_running(static_cast<uint64_t>(i));
    EXPECT_EQ(beats(load, 5), 1u) << i;  // 250 ms
  }
  links.HeartbeatSoon();
  EXPECT_EQ(beats(load, 1), 1u);
}

// Each router hears once how fast a connection is, whenever it came.
TEST(WorkerLinks, TellsRoutersWhatConnectionsGive) {
  WorkerLinks links{mesh::Register()};
  const auto told = [&links] {
    std::string out;
    for (const SendToRouter& sent : links.Take()) {
      if (!sent.message.has_connection()) continue;
      const mesh::ConnectionMeasured& c = sent.message.connection();
      out +=
          absl::StrFormat("%d: %s@%d %g ", sent.link, c.to(), c.to_epoch(), c.bytes_per_second());
    }
    return out;
  };
  links.Open(1);
  links.Open(2);
  links.OnRegistered(1, Accepted(100), kStart);
  links.TellConnection("decode-0", 7, 5e8);
  EXPECT_EQ(told(), "1: decode-0@7 5e+08 ");
  links.OnRegistered(2, Accepted(100), kStart);
  EXPECT_EQ(told(), "2: decode-0@7 5e+08 ");
  links.TellConnection("decode-0", 8, 4e8);
  EXPECT_EQ(told(), "1: decode-0@8 4e+08 2: decode-0@8 4e+08 ");
}

TEST(WorkerLinks, MergesTheViewsOfSeveralRouters) {
  WorkerLinks links({});
  links.Open(1);
  links.Open(2);
  EXPECT_EQ(Names(links.OnView(1, View(5, {{"a", 10}, {"b", 10}}))), "a@10 b@10 ");
  // A router that started later, with larger numbers, and has not met b yet.
  EXPECT_EQ(Names(links.OnView(2, View(900, {{"a", 10}}))), "unchanged");
  // b restarted; the first router still names its old life.
  EXPECT_EQ(Names(links.OnView(2, View(901, {{"a", 10}, {"b", 11}}))), "a@10 b@11 ");
  EXPECT_EQ(Names(links.OnView(1, View(4, {}))), "unchanged");  // older than what it said before
  EXPECT_EQ(Names(links.OnView(1, View(6, {}))), "unchanged");  // the second router knows them
  links.Close(2);
  EXPECT_EQ(Names(links.OnView(1, View(7, {}))), "");
  EXPECT_EQ(Names(links.OnView(2, View(1000, {{"c", 1}}))), "unchanged");  // a link that is gone
}

TEST(WorkerLinks, EpochOfTheMergedViewGrows) {
  WorkerLinks links({});
  links.Open(1);
  uint64_t last = 0;
  for (uint64_t i = 1; i < 10; ++i) {
    const auto view = links.OnView(1, View(i, {{"a", i}}));
    ASSERT_TRUE(view);
    EXPECT_GT(view->epoch(), last);
    last = view->epoch();
  }
}

TEST(WorkerLinks, SendsNothingOnALostLink) {
  WorkerLinks links({});
  links.Open(1);
  links.Close(1);
  links.Send(1, {});
  EXPECT_TRUE(links.Take().empty());
}

}  // namespace
}  // namespace deltamesh
