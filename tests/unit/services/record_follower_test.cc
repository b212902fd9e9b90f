// Records in stores follow their sessions, as transcripts: an older conversation never comes back.
#include "services/router/record_follower.h"

#include "tests/unit/services/session_harness.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

class RecordFollowerTest : public SessionCallsTest {
 protected:
  // A router that remembers one session, and a store.
  void SetUp() override {
    RouterOptions options = DefaultOptions();
    options.sessions_max = 1;
    Restart(options);
    JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  }
  // A turn of its own, with what is said to workers after its end.
  std::string Begin(const std::string& session, int64_t prompt, const std::string& id = "turn") {
    ClientRequest request = Make(id, prompt);
    request.session = Id(session);
    EXPECT_TRUE(core->Submit(request, now).ok());
    Drain();
    Tokens(kDecode, id, {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
    std::string said = Drain();
    return said.substr(said.find("usage"));
  }
  const SessionCounters& counts() const { return core->counters().sessions; }
};

// The name was used before, and suspended: begun anew and forgotten here, it comes back as it was last.
TEST_F(RecordFollowerTest, ANameBegunAnewTakesItsOldRecordsPlace) {
  EXPECT_THAT(Begin("s", 20), HasSubstr("2 <- Read 1\n"));
  EXPECT_EQ(core->gauges().sessions_unsettled, 1);
  const mesh::SessionRecord old = Old("s");
  mesh::WorkerMessage m;
  m.mutable_session()->set_call(1);
  *m.mutable_session()->mutable_record() = old;
  Send(kDecode, m);
  const mesh::SessionRecord fresh = Sent();
  EXPECT_EQ(fresh.tokens_size(), 21);
  EXPECT_GT(fresh.suspended_unix_ns(), old.suspended_unix_ns());  // whatever the clocks say
  // The stored state is of other tokens: 0, 1, 2, ... up to 256.
  EXPECT_EQ(fresh.position(), 0u);
  EXPECT_EQ(fresh.key(), std::string(16, '\0'));
  EXPECT_EQ(Reply(kDecode, 2), "");
  EXPECT_EQ(core->gauges().sessions_unsettled, 0);
  EXPECT_EQ(counts().recorded, 1u);
  EXPECT_EQ(Begin("other", 10), "usage 10+1 cached 0\n2 <- Read 3\n");  // pushes it out
  EXPECT_EQ(Call(Kind::kGet, "s"), "2 <- Read 4\n");
  EXPECT_EQ(ReplyRecord(kDecode, 4, fresh),
            "session c: 21 tokens, ended, suspended, position 0 at \"\" \n");
}

TEST_F(RecordFollowerTest, ANewNameIsAskedForOnceAndWritesNothing) {
  EXPECT_THAT(Begin("s", 20), HasSubstr("2 <- Read 1\n"));
  EXPECT_EQ(Reply(kDecode, 1, absl::NotFoundError("none")), "");
  EXPECT_EQ(core->gauges().sessions_unsettled, 0);
  EXPECT_EQ(Begin("s", 30), "usage 30+1 cached 0\n");
  // One that is refused is refused to all: there is nothing to fall back to.
  EXPECT_THAT(Begin("t", 20), HasSubstr("2 <- Read 2\n"));
  EXPECT_EQ(Reply(kDecode, 2, absl::DataLossError("checksum")), "");
  EXPECT_EQ(core->gauges().sessions_unsettled, 0);
}

// A store that was away while the name was begun has an older conversation under it.
TEST_F(RecordFollowerTest, AStoreThatCameBackIsAskedToo) {
  const auto come_back = [&] {
    core->OnLinkClosed(kPrefill, absl::UnavailableError("reset"), now);
    Drain();
    JoinWithStore(kPrefill, "p1", mesh::ROLE_PREFILL);
  };
  const auto read = [](int call) {
    return absl::StrFormat("2 <- Read %1$d\n1 <- Read %1$d\n", call);
  };
  EXPECT_EQ(Begin("s", 20), "usage 20+1 cached 0\n2 <- Read 1\n");
  Reply(kDecode, 1, absl::NotFoundError("none"));
  come_back();
  EXPECT_EQ(Begin("s", 30), "usage 30+1 cached 0\n" + read(2));
  Reply(kDecode, 2, absl::NotFoundError("none"));
  EXPECT_EQ(Reply(kPrefill, 2, absl::NotFoundError("none")), "");
  EXPECT_EQ(Begin("s", 40), "usage 40+1 cached 0\n");
  // Between question and answer of another one.
  come_back();
  EXPECT_EQ(Begin("s", 50), "usage 50+1 cached 0\n" + read(3));
  Reply(kPrefill, 3, absl::NotFoundError("none"));
  come_back();
  EXPECT_EQ(Reply(kDecode, 3, absl::NotFoundError("none")), read(4));
  Reply(kDecode, 4, absl::NotFoundError("none"));
  EXPECT_EQ(Reply(kPrefill, 4, absl::NotFoundError("none")), "");
  // Before the session is forgotten for room.
  come_back();
  EXPECT_THAT(Begin("t", 10), HasSubstr(read(5) + read(6)));
  EXPECT_EQ(core->gauges().sessions_unsettled, 2);
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 51 tokens, ended, position 0 at \"\" \n");
}

TEST_F(RecordFollowerTest, WithoutAStoreNobodyIsAsked) {
  Restart(DefaultOptions());
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  EXPECT_EQ(Begin("s", 20), "usage 20+1 cached 0\n");
  EXPECT_EQ(core->gauges().sessions_unsettled, 0);
}

// Pushed out before the store answered, the session is still the one that is called.
TEST_F(RecordFollowerTest, AnUnsettledSessionIsNotForgotten) {
  Begin("s", 20);
  EXPECT_THAT(Begin("t", 10), HasSubstr("2 <- Read 2\n"));
  EXPECT_EQ(core->gauges().sessions, 1);
  EXPECT_EQ(core->gauges().sessions_unsettled, 2);
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 21 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(Call(Kind::kOpen, "t"), "session c: 11 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(Call(Kind::kFork, "t", "s"),
            "session c: ALREADY_EXISTS: new_session: \"s\" exists; use another name, or set "
            "replace\n");
  // Its record follows it from where it is.
  EXPECT_EQ(Call(Kind::kGet, "t"), "session c: 11 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(ReplyRecord(kDecode, 1, Old("s")), "2 <- Suspend 3 tokens=21\n");
  EXPECT_EQ(Reply(kDecode, 2, absl::NotFoundError("none")), "");
  EXPECT_EQ(Reply(kDecode, 3), "");
  EXPECT_EQ(core->gauges().sessions_unsettled, 0);
  EXPECT_EQ(Call(Kind::kGet, "s"), "2 <- Read 4\n");
}

// Begun anew and pushed out while an append waits for what stores have of it: the append goes on from there.
TEST_F(RecordFollowerTest, AnOpenTakesWhatWasBegunAnewMeanwhile) {
  EXPECT_EQ(Call(Kind::kOpen, "s"), "2 <- Read 1\n");
  Begin("s", 20);
  Begin("t", 10);
  EXPECT_THAT(ReplyRecord(kDecode, 1, Old("s")), HasSubstr("session c: 21 tokens"));
  EXPECT_EQ(Reply(kDecode, 3, absl::NotFoundError("none")), "");  // of t
  EXPECT_EQ(core->gauges().sessions_unsettled, 1);
}

// A write that fails is tried again, later and later, with what the session is by then.
TEST_F(RecordFollowerTest, FailedWritesAreTriedAgain) {
  Begin("s", 20);
  EXPECT_EQ(ReplyRecord(kDecode, 1, Old("s")), "2 <- Suspend 2 tokens=21\n");
  EXPECT_EQ(Reply(kDecode, 2, absl::ResourceExhaustedError("the disk is full")), "");
  EXPECT_EQ(counts().records_retried, 1u);
  EXPECT_EQ(Refused(SessionRefusal::kStore), 1u);
  EXPECT_EQ(Wait(absl::Milliseconds(900)), "");
  EXPECT_EQ(Wait(absl::Milliseconds(200)), "2 <- Suspend 3 tokens=21\n");
  EXPECT_EQ(Begin("s", 30), "usage 30+1 cached 0\n");  // that one is still out
  EXPECT_EQ(Reply(kDecode, 3, absl::InternalError("input/output error")), "");
  EXPECT_EQ(Wait(absl::Milliseconds(1900)), "");
  EXPECT_EQ(Wait(absl::Milliseconds(200)), "2 <- Suspend 4 tokens=31\n");
  core->OnLinkClosed(kDecode, absl::UnavailableError("reset"), now);
  EXPECT_EQ(Drain(), "");
  Pass(absl::Seconds(5), {});
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  Pass(absl::Seconds(120), {kDecode2});
  EXPECT_THAT(Drain(), ::testing::StartsWith("4 <- Suspend 5 tokens=31\n"));
  EXPECT_EQ(core->gauges().sessions_unsettled, 1);
}

TEST_F(RecordFollowerTest, WaitsBetweenTriesAreBounded) {
  Begin("s", 20);
  uint64_t call = 1;
  for (int i = 0; i < 12; ++i) {
    Reply(kDecode, call++, absl::UnavailableError("no bucket"));
    const absl::Time failed = now;
    while (Wait(absl::Milliseconds(200)).empty() && now < failed + 2 * RecordFollower::kRetryMax) {
    }
    const absl::Duration asked = RecordFollower::kRetryFirst * (1 << std::min(i, 20));
    EXPECT_LE(now - failed, std::min(asked, RecordFollower::kRetryMax) + absl::Milliseconds(200));
    EXPECT_GE(now - failed, std::min(asked, RecordFollower::kRetryMax));
  }
  EXPECT_EQ(counts().records_retried, 12u);
}

// What was said while a write is out is written after it, once.
TEST_F(RecordFollowerTest, OneWriteAtATime) {
  Begin("s", 20);
  ReplyRecord(kDecode, 1, Old("s"));
  EXPECT_EQ(Begin("s", 30), "usage 30+1 cached 0\n");
  EXPECT_EQ(Begin("s", 40), "usage 40+1 cached 0\n");
  EXPECT_EQ(Reply(kDecode, 2), "2 <- Suspend 3 tokens=41\n");
  EXPECT_EQ(Reply(kDecode, 3), "");
  EXPECT_EQ(core->gauges().sessions_unsettled, 0);
  // A store that says nothing is asked again.
  EXPECT_EQ(Begin("s", 50), "usage 50+1 cached 0\n2 <- Suspend 4 tokens=51\n");
  EXPECT_EQ(Wait(absl::Seconds(59)), "");
  EXPECT_EQ(Wait(absl::Seconds(3)), "2 <- Suspend 5 tokens=51\n");
  EXPECT_EQ(Reply(kDecode, 4), "");  // late
  EXPECT_EQ(core->counters().stale_messages, 1u);
}

// There is a bound; what is beyond it is lost, and said to be: no older conversation takes its place.
TEST_F(RecordFollowerTest, WhatIsLostIsRefused) {
  RouterOptions options = DefaultOptions();
  options.sessions_max = 1;
  options.session_bytes_max = SessionTable::kEntryBytes + 200;
  Restart(options);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Begin("s", 20);
  Begin("t", 20);
  Begin("u", 20);  // s is kept beside the table, t is not
  EXPECT_EQ(counts().records_lost, 1u);
  EXPECT_EQ(core->gauges().sessions_unsettled, 2);
  EXPECT_EQ(Call(Kind::kOpen, "t"), "2 <- Read 4\n");
  EXPECT_EQ(ReplyRecord(kDecode, 4, Old("t")),
            "session c: DATA_LOSS: session: what was last said in \"t\" was lost, and what stores "
            "have of it is older; begin the session anew, or raise --sessions and --session-mib\n");
  EXPECT_EQ(Refused(SessionRefusal::kDamaged), 1u);
  // Larger than all room.
  Begin("v", 200);
  EXPECT_EQ(counts().records_lost, 2u);
}

TEST_F(RecordFollowerTest, FarFewerAreOutThanWait) {
  RouterOptions options = DefaultOptions();
  options.sessions_max = 1000;
  Restart(options);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  int asked = 0;
  const auto count = [&](const std::string& said) {
    for (size_t at = 0; (at = said.find("Read", at)) != std::string::npos; ++at) ++asked;
  };
  for (int i = 0; i < 200; ++i) count(Begin("s" + std::to_string(i), 5));
  EXPECT_EQ(asked, static_cast<int>(RecordFollower::kAtOnceMax));
  for (uint64_t call = 1; call <= 200; ++call) {
    count(Reply(kDecode, call, absl::NotFoundError("none")));
  }
  EXPECT_EQ(asked, 200);
  EXPECT_EQ(core->gauges().sessions_unsettled, 0);
}

// A fork that may replace takes the place of what is stored under the name, too.
TEST_F(RecordFollowerTest, AForkThatReplacesTakesTheOldRecordsPlace) {
  Begin("s", 20);
  Reply(kDecode, 1, absl::NotFoundError("none"));
  EXPECT_EQ(Call(Kind::kFork, "s", "t", true),
            "2 <- Read 2\nsession c: 21 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(ReplyRecord(kDecode, 2, Old("t")), "2 <- Suspend 3 tokens=21\n");
}

}  // namespace
}  // namespace deltamesh
