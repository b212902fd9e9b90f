// Registration, leases and the expert table, as transcripts.
#include "tests/unit/services/router_harness.h"

namespace deltamesh {
namespace {

using MembershipTest = RouterCoreTest;
using ::testing::HasSubstr;

TEST_F(MembershipTest, RegistersAndLearnsTheIdentity) {
  EXPECT_FALSE(core->identity().has_value());
  Open(1, TestRegister("d1", mesh::ROLE_DECODE));
  EXPECT_EQ(Drain(), "1 <- Registered by r\n");
  EXPECT_EQ(core->identity()->digest(), "d1");
  EXPECT_EQ(core->context_tokens(), 2048);
  EXPECT_TRUE(core->Ready().ok());
}

TEST_F(MembershipTest, EveryMismatchIsRefusedWithBothValues) {
  Join(1, "d1", mesh::ROLE_DECODE);
  struct Case {
    std::function<void(mesh::Register*)> change;
    std::string expect;
  };
  const std::vector<Case> cases = {
      {[](mesh::Register* r) { r->mutable_model()->set_digest("d2"); },
       "model digest: worker has \"d2\", router has \"d1\""},
      {[](mesh::Register* r) { r->mutable_model()->set_text_digest("t2"); },
       "text_digest: worker has \"t2\", router has \"t1\""},
      {[](mesh::Register* r) { r->mutable_model()->set_state_layout(2); },
       "state_layout: worker has 2, router has 1"},
      {[](mesh::Register* r) { r->mutable_model()->set_block_tokens(128); },
       "block_tokens: worker has 128, router has 64"},
      {[](mesh::Register* r) { r->mutable_model()->set_tile_tokens(32); },
       "tile_tokens: worker has 32, router has 16"},
      {[](mesh::Register* r) { r->mutable_model()->set_protocol(9); },
       absl::StrFormat("protocol: worker has 9, router has %d", kMeshProtocol)},
      {[](mesh::Register* r) { r->set_transport_kind("ucx"); },
       "transport_kind: worker has \"ucx\", router has \"inproc\""},
  };
  LinkId link = 10;
  for (const Case& c : cases) {
    mesh::WorkerMessage m = TestRegister("p1", mesh::ROLE_PREFILL);
    c.change(m.mutable_register_());
    Open(++link, m);
    const std::string out = Drain();
    EXPECT_THAT(out, HasSubstr(absl::StrFormat("%d closed FAILED_PRECONDITION", link)));
    EXPECT_THAT(out, HasSubstr(c.expect));
  }
  EXPECT_EQ(core->counters().registrations_refused, cases.size());
  EXPECT_EQ(core->gauges().prefill_workers, 0);
}

TEST_F(MembershipTest, ConfiguredIdentityBindsTheFirstRegistrantToo) {
  RouterOptions o = DefaultOptions();
  o.identity.set_digest("other");
  Restart(o);
  Open(1, TestRegister("d1", mesh::ROLE_DECODE));
  EXPECT_THAT(Drain(), HasSubstr("worker has \"d1\", router has \"other\""));
  EXPECT_EQ(core->identity()->digest(), "other");
}

TEST_F(MembershipTest, TextAndProtocolBindTheFirstRegistrantToo) {
  RouterOptions o = DefaultOptions();
  o.identity.set_text_digest("mine");
  Restart(o);
  mesh::WorkerMessage m = TestRegister("d1", mesh::ROLE_DECODE);
  m.mutable_register_()->mutable_model()->set_protocol(kMeshProtocol + 1);
  Open(1, m);
  const std::string out = Drain();
  EXPECT_THAT(out, HasSubstr("text_digest: worker has \"t1\", router has \"mine\""));
  EXPECT_THAT(out, HasSubstr(absl::StrFormat("protocol: worker has %d, router has %d",
                                             kMeshProtocol + 1, kMeshProtocol)));
  EXPECT_FALSE(core->Ready().ok());
  // The whole digest is still free: the first worker that fits names it.
  EXPECT_FALSE(core->identity().has_value());
  m = TestRegister("d1", mesh::ROLE_DECODE);
  m.mutable_register_()->mutable_model()->set_text_digest("mine");
  Open(2, m);
  EXPECT_EQ(Drain(), "2 <- Registered by r\n");
  EXPECT_EQ(core->identity()->digest(), "d1");
}

TEST_F(MembershipTest, IncompleteRegistrationsAreRefused) {
  const std::vector<std::function<void(mesh::Register*)>> changes = {
      [](mesh::Register* r) { r->clear_name(); },
      [](mesh::Register* r) { r->clear_role(); },
      [](mesh::Register* r) { r->clear_model(); },
      [](mesh::Register* r) { r->mutable_capacity()->set_slabs(0); },
      [](mesh::Register* r) { r->mutable_capacity()->set_latent_blocks(0); },
      [](mesh::Register* r) {
        r->set_role(mesh::ROLE_EXPERT);
        r->mutable_experts()->set_shards(2);
        r->mutable_experts()->set_shard(2);
      },
      [](mesh::Register* r) {
        r->set_role(mesh::ROLE_EXPERT);
        r->mutable_experts()->set_shards(4'000'000'000u);
        r->mutable_experts()->add_experts(0);
      },
      [](mesh::Register* r) {
        r->set_role(mesh::ROLE_EXPERT);
        r->mutable_experts()->set_shards(1);
        r->mutable_experts()->add_experts(4'000'000'000u);
      },
      [](mesh::Register* r) { r->mutable_capacity()->set_slabs((uint64_t{1} << 40) + 1); },
      [](mesh::Register* r) { r->mutable_capacity()->set_latent_blocks(~uint64_t{0}); },
      [](mesh::Register* r) { r->mutable_capacity()->set_context_tokens(uint64_t{1} << 63); },
      [](mesh::Register* r) { r->mutable_model()->set_block_tokens(~0u); },
  };
  LinkId link = 0;
  for (const auto& change : changes) {
    mesh::WorkerMessage m = TestRegister("d1", mesh::ROLE_DECODE);
    change(m.mutable_register_());
    Open(++link, m);
    EXPECT_THAT(Drain(), HasSubstr("closed INVALID_ARGUMENT")) << link;
  }
}

TEST_F(MembershipTest, NewerAndEqualEpochReplaceOlderIsRefused) {
  Join(1, "d1", mesh::ROLE_DECODE, 5);
  ASSERT_TRUE(Submit("a", 10).ok());
  Drain();
  Open(2, TestRegister("d1", mesh::ROLE_DECODE, 4));
  EXPECT_THAT(Drain(),
              HasSubstr("2 closed FAILED_PRECONDITION: epoch: worker \"d1\" registers with "
                        "epoch 4, epoch 5 is registered"));
  Open(3, TestRegister("d1", mesh::ROLE_DECODE, 5));  // the same life on a new connection
  EXPECT_EQ(
      Drain(),
      "1 closed ABORTED: worker \"d1\" registered again with epoch 5\n"
      "3 <- Registered by r\n"
      "client a failed UNAVAILABLE: decode worker \"d1\" was lost: it registered again with epoch "
      "5; send the request again\n");
  Open(4, TestRegister("d1", mesh::ROLE_DECODE, 6));
  EXPECT_EQ(
      Drain(),
      "3 closed ABORTED: worker \"d1\" registered again with epoch 6\n4 <- Registered by r\n");
  EXPECT_EQ(core->gauges().decode_workers, 1);
  // The old link's end must not take the new life down.
  core->OnLinkClosed(1, absl::OkStatus(), now);
  core->OnLinkClosed(3, absl::OkStatus(), now);
  EXPECT_EQ(core->gauges().decode_workers, 1);
}

TEST_F(MembershipTest, LinksMustRegisterInTimeAndFirst) {
  core->OnLinkOpened(1, now);
  core->OnLinkOpened(2, now);
  Beat(2);
  EXPECT_EQ(Drain(),
            "2 closed FAILED_PRECONDITION: the first message of a link must be Register\n");
  now += absl::Milliseconds(5001);
  core->Tick(now);
  EXPECT_EQ(Drain(), "1 closed DEADLINE_EXCEEDED: no registration within 5s of opening the link\n");
}

TEST_F(MembershipTest, RegisteringTwiceOnOneLinkEndsIt) {
  Join(1, "d1", mesh::ROLE_DECODE);
  Send(1, TestRegister("d1", mesh::ROLE_DECODE, 2));
  EXPECT_THAT(Drain(), HasSubstr("1 closed FAILED_PRECONDITION: worker \"d1\" registers twice"));
  EXPECT_EQ(core->gauges().decode_workers, 0);
}

TEST_F(MembershipTest, MessagesOfAnotherRoleEndTheLink) {
  Join(1, "p1", mesh::ROLE_PREFILL);
  Grant(1, "a", 64, 1);
  EXPECT_THAT(Drain(), HasSubstr("1 closed FAILED_PRECONDITION: worker \"p1\" sent message kind"));
  EXPECT_EQ(core->gauges().prefill_workers, 0);
}

TEST_F(MembershipTest, LinkBound) {
  RouterOptions o = DefaultOptions();
  o.links_max = 1;
  Restart(o);
  core->OnLinkOpened(1, now);
  core->OnLinkOpened(2, now);
  EXPECT_THAT(Drain(), HasSubstr("2 closed RESOURCE_EXHAUSTED"));
  core->OnLinkClosed(1, absl::OkStatus(), now);
  core->OnLinkOpened(3, now);
  EXPECT_EQ(Drain(), "");
}

mesh::WorkerMessage Shard(const std::string& name, uint32_t shard, uint32_t shards,
                          uint64_t epoch = 1) {
  mesh::WorkerMessage m = TestRegister(name, mesh::ROLE_EXPERT, epoch);
  m.mutable_register_()->mutable_experts()->set_shard(shard);
  m.mutable_register_()->mutable_experts()->set_shards(shards);
  return m;
}

TEST_F(MembershipTest, ViewGoesToAttentionWorkersOnEveryChange) {
  Join(1, "d1", mesh::ROLE_DECODE);
  Open(2, Shard("e0", 0, 2));
  EXPECT_EQ(Drain(), "2 <- Registered by r\n1 <- View 101 [e0]\n");
  EXPECT_EQ(Submit("a", 10).ToString(),
            "UNAVAILABLE: expert shard 1 of 2 is not connected; retry when it is back");
  Open(3, Shard("e1", 1, 2));
  EXPECT_EQ(Drain(), "3 <- Registered by r\n1 <- View 102 [e0 e1]\n");
  Open(4, TestRegister("p1", mesh::ROLE_PREFILL));
  EXPECT_EQ(Drain(), "4 <- Registered by r\n4 <- View 102 [e0 e1]\n");
  EXPECT_TRUE(core->Ready().ok());
  core->OnLinkClosed(2, absl::UnavailableError("reset"), now);
  EXPECT_EQ(Drain(), "1 <- View 103 [e1]\n4 <- View 103 [e1]\n");
  EXPECT_FALSE(core->Ready().ok());
  Open(5, Shard("e0", 0, 2, 2));
  EXPECT_EQ(Drain(), "5 <- Registered by r\n1 <- View 104 [e0 e1]\n4 <- View 104 [e0 e1]\n");
  EXPECT_EQ(core->counters().expert_lost, 1u);
}

// Workers say whether they have routed experts of their own: without any shard there is no readiness by those
// that have none.
TEST_F(MembershipTest, WithoutShardsSomebodyMustHaveTheExperts) {
  mesh::WorkerMessage needs = TestRegister("d1", mesh::ROLE_DECODE);
  needs.mutable_register_()->set_needs_shards(true);
  Open(1, needs);
  const std::string why = core->Ready().ToString();
  EXPECT_THAT(why,
              HasSubstr("UNAVAILABLE: no expert shard is connected, and decode worker \"d1\""));
  EXPECT_THAT(why, HasSubstr("start `deltamesh expert` shards"));
  EXPECT_THAT(why, HasSubstr("--local-experts"));
  EXPECT_EQ(Submit("a", 10).ToString(), why);
  Drain();
  // One that has them serves, alone: nothing goes to the others.
  Join(2, "d2", mesh::ROLE_DECODE);
  needs = TestRegister("p1", mesh::ROLE_PREFILL);
  needs.mutable_register_()->set_needs_shards(true);
  Open(3, needs);
  Drain();
  EXPECT_TRUE(core->Ready().ok()) << core->Ready();
  for (const char* id : {"b", "c", "d"}) {
    EXPECT_TRUE(Submit(id, 100).ok());
    EXPECT_THAT(Drain(),
                HasSubstr(absl::StrFormat("2 <- StartDecode %s prompt=100 handoff=0", id)));
  }
  // With shards all do.
  Open(4, Shard("e0", 0, 1));
  Drain();
  EXPECT_TRUE(Submit("e", 100).ok());
  EXPECT_THAT(Drain(), HasSubstr("1 <- StartDecode e prompt=100 handoff=64"));
}

TEST_F(MembershipTest, AnotherShardCountIsRefusedWhileOthersLive) {
  Join(1, "d1", mesh::ROLE_DECODE);
  Open(2, Shard("e0", 0, 1));
  Drain();
  EXPECT_TRUE(core->Ready().ok());
  Open(3, Shard("evil", 0, 1000));
  EXPECT_THAT(Drain(), HasSubstr("3 closed FAILED_PRECONDITION: experts.shards: worker \"evil\" "
                                 "divides the experts by 1000, connected worker \"e0\" by 1"));
  EXPECT_TRUE(core->Ready().ok());
  // The same worker may come back divided anew, alone.
  Open(4, Shard("e0", 0, 2, 2));
  EXPECT_THAT(core->Ready().ToString(), HasSubstr("expert shard 1 of 2"));
  core->OnLinkClosed(4, absl::UnavailableError("reset"), now);
  EXPECT_FALSE(core->Ready().ok());  // attention workers still have no experts of their own
  Open(5, Shard("e9", 0, 1));
  EXPECT_TRUE(core->Ready().ok());
}

TEST_F(MembershipTest, EveryExpertIdMustBeHosted) {
  Join(1, "d1", mesh::ROLE_DECODE);
  mesh::WorkerMessage first = Shard("e0", 0, 2);  // hosts 0
  mesh::WorkerMessage second = Shard("e1", 1, 2);
  second.mutable_register_()->mutable_experts()->clear_experts();
  second.mutable_register_()->mutable_experts()->add_experts(2);
  Open(2, first);
  Open(3, second);
  EXPECT_EQ(core->Ready().ToString(),
            "UNAVAILABLE: expert 1 is on no connected shard; start a shard that hosts it");
  second.mutable_register_()->mutable_experts()->add_experts(1);
  Open(4, second);
  EXPECT_TRUE(core->Ready().ok()) << core->Ready();
}

TEST_F(MembershipTest, AbsurdHeartbeatsGiveNoRoomThatIsNotThere) {
  Join(1, "d1", mesh::ROLE_DECODE);
  Beat(1, ~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0});
  EXPECT_TRUE(Submit("a", 10).ok());
  EXPECT_EQ(Drain(), "1 <- StartDecode a prompt=10 handoff=0 max=8 attempt=1\n");
}

TEST(RouterOptionsTest, BrokenRelationsAreNamed) {
  RouterOptions o;
  EXPECT_TRUE(o.Validate().ok());
  o.lease = absl::Milliseconds(500);
  EXPECT_THAT(o.Validate().ToString(), HasSubstr("lease: 500ms is shorter than three heartbeats"));
  o = RouterOptions();
  o.waiting_requests_max = 0;
  EXPECT_THAT(o.Validate().ToString(), HasSubstr("waiting_requests_max: 0"));
  o = RouterOptions();
  o.live_requests_max = 5;
  EXPECT_FALSE(o.Validate().ok());
}

}  // namespace
}  // namespace deltamesh
