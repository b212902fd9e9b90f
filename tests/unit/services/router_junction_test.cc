// Where a prompt parts from what others hold: whoever computes it is told to keep a snapshot there.
#include "runtime/prefix/prefix_hash.h"
#include "tests/unit/services/router_harness.h"

namespace deltamesh {
namespace {

constexpr LinkId kHolder = 1, kOther = 2, kDecode = 3;

class RouterJunctionTest : public RouterCoreTest {
 protected:
  RouterJunctionTest() {
    Join(kHolder, "p1", mesh::ROLE_PREFILL);
    Join(kOther, "p2", mesh::ROLE_PREFILL);
    Join(kDecode, "d1", mesh::ROLE_DECODE);
  }
  // The worker has so many blocks of tokens 0, 1, 2, ..., and snapshots at some of them.
  void Hold(LinkId link, int64_t blocks, const std::vector<int64_t>& snapshots,
            mesh::PrefixChanges::What what = mesh::PrefixChanges::SNAPSHOT_ADDED) {
    PrefixChain chain(PrefixModel("d1", 1), "");
    chain.Append(Make("", blocks * 64).prompt);
    mesh::WorkerMessage m;
    m.mutable_prefixes()->set_complete(true);
    const auto tell = [&](int64_t block, mesh::PrefixChanges::What what) {
      m.mutable_prefixes()->add_keys(chain.keys()[static_cast<size_t>(block - 1)].index());
      m.mutable_prefixes()->mutable_changes()->push_back(static_cast<char>(what));
    };
    for (int64_t i = 1; i <= blocks; ++i) tell(i, mesh::PrefixChanges::LATENTS_ADDED);
    for (const int64_t i : snapshots) tell(i, what);
    Send(link, m);
    Drain();
  }
  // What the prefill worker of a prompt of so many blocks and a token is told; p1 has no room.
  int64_t Told(int64_t blocks) {
    Beat(kHolder, 0);
    const std::string id = absl::StrFormat("r%d", ++requests_);
    EXPECT_TRUE(Submit(id, blocks * 64 + 1).ok());
    Drain();
    Grant(kDecode, id, static_cast<uint64_t>(blocks * 64), attempts[id]);
    int64_t junction = -1;
    for (const RouterAction& action : core->TakeActions()) {
      const auto* sent = std::get_if<SendToWorker>(&action);
      if (sent == nullptr || !sent->message.has_start_prefill()) continue;
      EXPECT_EQ(sent->link, kOther);
      junction = static_cast<int64_t>(sent->message.start_prefill().cache().junction());
    }
    EXPECT_TRUE(core->CancelClient(id, now));
    Drain();
    return junction;
  }
  int requests_ = 0;
};

TEST_F(RouterJunctionTest, WhereTheLongestLatentsEnd) {
  EXPECT_EQ(Told(14), 0);
  Hold(kHolder, 10, {});
  EXPECT_EQ(Told(14), 640);
  EXPECT_EQ(Told(10), 0) << "its tail stands there";
  EXPECT_EQ(Told(9), 0) << "it is known to its end";
}

TEST_F(RouterJunctionTest, NotNearASnapshotWhereverThatIs) {
  Hold(kHolder, 10, {});
  Join(4, "d2", mesh::ROLE_DECODE);
  Hold(4, 7, {7}, mesh::PrefixChanges::SNAPSHOT_COLD);
  Beat(4, 4, 64, 0, /*draining=*/true);
  EXPECT_EQ(Told(14), 0);
}

TEST_F(RouterJunctionTest, NotBeforeAStateInAnObjectStore) {
  Hold(kHolder, 10, {10}, mesh::PrefixChanges::OBJECT_ADDED);
  EXPECT_EQ(Told(14), 0);
}

TEST_F(RouterJunctionTest, BeyondASnapshotByAsMuchAsWorkersAsk) {
  Hold(kHolder, 10, {6});
  EXPECT_EQ(Told(14), 640);
}

TEST_F(RouterJunctionTest, AlsoWhoComputesAndDecodesIsTold) {
  core->OnLinkClosed(kOther, Unavailable("gone"), now);
  core->OnLinkClosed(kHolder, Unavailable("gone"), now);
  Join(4, "d2", mesh::ROLE_DECODE);
  Hold(kDecode, 10, {});
  Beat(kDecode, 0);
  ASSERT_TRUE(Submit("r", 14 * 64).ok());
  uint64_t junction = 0;
  for (const RouterAction& action : core->TakeActions()) {
    const auto* sent = std::get_if<SendToWorker>(&action);
    if (sent == nullptr || !sent->message.has_start_decode()) continue;
    EXPECT_EQ(sent->link, 4u);
    junction = sent->message.start_decode().cache().junction();
  }
  EXPECT_EQ(junction, 640u);
}

}  // namespace
}  // namespace deltamesh
