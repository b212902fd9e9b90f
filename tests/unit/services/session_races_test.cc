// What comes between a question to stores and its answer, as transcripts: whatever the order, the newest
// content of a session counts, and its record is later than all before.
#include "services/router/record_follower.h"
#include "tests/unit/services/session_harness.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

const absl::Status kFull = absl::ResourceExhaustedError("the disk is full");
const absl::Status kNone = absl::NotFoundError("none");

class SessionRacesTest : public SessionCallsTest {
 protected:
  void SetUp() override { Start(1); }
  void Start(int64_t sessions_max) {
    RouterOptions options = DefaultOptions();
    options.sessions_max = sessions_max;
    Restart(options);
    JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  }
  // A turn whose prompt is `first`, 1, 2, ...; what workers were told since.
  std::string Begin(const std::string& session, int64_t prompt, int first = 0) {
    ClientRequest request = Make("turn", prompt);
    request.session = Id(session);
    request.prompt[0] = first;
    EXPECT_TRUE(core->Submit(request, now).ok());
    Drain();
    Tokens(kDecode, "turn", {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
    const std::string said = Drain();
    return said.substr(said.find("cached 0\n") + 9);
  }
  std::string Other(Kind kind, const std::string& name) {
    core->CallSession({.id = "other",
                       .kind = kind,
                       .session = Id(name),
                       .name = name,
                       .salt = "",
                       .target = "",
                       .target_name = ""},
                      now);
    return Drain();
  }
  void Answer(uint64_t call, const absl::Status& status, uint64_t position = 0) {
    mesh::WorkerMessage m;
    m.mutable_session()->set_call(call);
    m.mutable_session()->set_code(static_cast<int>(status.code()));
    m.mutable_session()->set_position(position);
    Send(kDecode, m);
  }
};

// ---- what is begun and suspended while stores are asked ------------------------------------------

TEST_F(SessionRacesTest, AResumeSeesThatTheSessionIsBeingSuspended) {
  EXPECT_EQ(Call(Kind::kResume, "s"), "2 <- Read 1\n");
  EXPECT_EQ(Begin("s", 20), "2 <- Read 2\n");
  EXPECT_EQ(Other(Kind::kSuspend, "s"), "2 <- Suspend 3 tokens=21\n");
  EXPECT_EQ(Reply(kDecode, 1, kNone),
            "session c: FAILED_PRECONDITION: session: \"s\" is being suspended; call again when it "
            "is\n");
}

// The record may be there although the worker could not say so: it follows the session, and is never what a
// later turn is answered from.
TEST_F(SessionRacesTest, ARecordThatMayHaveBeenWrittenFollowsItsSession) {
  for (const bool refused : {false, true}) {
    Start(8);
    Begin("s", 20);
    Reply(kDecode, 1, kNone);
    EXPECT_EQ(Call(Kind::kSuspend, "s"), "2 <- Suspend 2 tokens=21\n");
    const std::string said =
        Reply(kDecode, 2, refused ? kFull : absl::UnavailableError("no answer"));
    EXPECT_THAT(said, HasSubstr("stays in memory"));
    now += absl::Seconds(5);
    core->Tick(now);
    EXPECT_EQ(said.find("Suspend 3") != said.npos || Drain().find("Suspend 3") != std::string::npos,
              !refused);
  }
}

// The same, where a turn had stores asked before the suspension failed: what they said is older than that.
TEST_F(SessionRacesTest, ARecordThatMayHaveBeenWrittenIsReplacedAfterARead) {
  Start(8);
  Begin("s", 20);
  EXPECT_EQ(Call(Kind::kSuspend, "s"), "2 <- Suspend 2 tokens=21\n");
  EXPECT_EQ(Begin("s", 30), "2 <- Read 3\n");
  EXPECT_THAT(Reply(kDecode, 2, absl::UnavailableError("no answer")), HasSubstr("stays in memory"));
  EXPECT_EQ(Reply(kDecode, 3, kNone), "2 <- Suspend 4 tokens=31\n");
}

// A worker whose bucket is down has an older record on its disk: the newest may be in the bucket.
TEST_F(SessionRacesTest, APartOfAStoreIsNotBelieved) {
  const auto read = [&](uint64_t call, uint64_t stamp, bool partial) {
    return Reply(kDecode, call, {}, [&](mesh::SessionReply* reply) {
      reply->set_partial(partial);
      *reply->mutable_record() = Record("s", 30, 0);
      reply->mutable_record()->set_suspended_unix_ns(stamp);
    });
  };
  Call(Kind::kResume, "s");
  EXPECT_THAT(read(1, 10, true), HasSubstr("UNAVAILABLE: worker \"d1\" could read only a part"));
  Call(Kind::kResume, "s");
  EXPECT_THAT(read(2, 10, true), HasSubstr("UNAVAILABLE")) << "what was refused is not noted";
  Call(Kind::kGet, "s");
  EXPECT_THAT(read(3, 20, false), HasSubstr("session c: 30 tokens"));
  Call(Kind::kGet, "s");
  EXPECT_THAT(read(4, 10, true), HasSubstr("UNAVAILABLE")) << "a newer one is known";
  Call(Kind::kGet, "s");
  EXPECT_THAT(read(5, 20, true), HasSubstr("session c: 30 tokens")) << "it is the newest known";
}

// All workers read one bucket: who could not is vouched for by who could. A disk is its worker's alone.
TEST_F(SessionRacesTest, AnotherWorkersBucketIsAsGood) {
  for (const bool of_bucket : {true, false}) {
    Start(8);
    JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
    EXPECT_EQ(Call(Kind::kGet, "s"), "2 <- Read 1\n4 <- Read 1\n");
    const auto read = [&](LinkId link, uint64_t stamp, const char* tier, bool partial) {
      return Reply(link, 1, {}, [&](mesh::SessionReply* reply) {
        reply->set_partial(partial);
        reply->set_tier(tier);
        *reply->mutable_record() = Record("s", 30, 0);
        reply->mutable_record()->set_suspended_unix_ns(stamp);
      });
    };
    read(kDecode, 10, of_bucket ? "disk" : "object store", true);
    EXPECT_THAT(read(kDecode2, 20, "object store", false),
                HasSubstr(of_bucket ? "session c: 30 tokens" : "UNAVAILABLE"));
  }
}

TEST_F(SessionRacesTest, WhatWasSuspendedMeanwhileIsReadAgain) {
  JoinWithStore(kPrefill, "p1", mesh::ROLE_PREFILL);
  EXPECT_EQ(Call(Kind::kResume, "s"), "2 <- Read 1\n1 <- Read 1\n");
  EXPECT_EQ(ReplyRecord(kPrefill, 1, Record("s", 30, 0)), "");
  Begin("s", 20);
  EXPECT_EQ(Other(Kind::kSuspend, "s"), "2 <- Suspend 3 tokens=21\n");
  EXPECT_THAT(Reply(kDecode, 3), StartsWith("session other: 21 tokens"));
  EXPECT_EQ(Reply(kDecode, 1, kNone), "2 <- Read 4\n1 <- Read 4\n");
  // What was read before counts no more.
  EXPECT_EQ(Reply(kDecode, 4, kNone), "");
  EXPECT_THAT(Reply(kPrefill, 4, kNone), StartsWith("session c: NOT_FOUND"));
}

// The record that was read is of other tokens: there is no state of it to load.
TEST_F(SessionRacesTest, ForWhatWasBegunMeanwhileNoOldStateIsLoaded) {
  JoinWithStore(kPrefill, "p1", mesh::ROLE_PREFILL);
  Call(Kind::kResume, "s");
  ReplyRecord(kPrefill, 1, Record("s", 100, 64));
  Begin("s", 20);
  EXPECT_EQ(Reply(kDecode, 1, kNone), "session c: 21 tokens, ended, position 0 at \"\" \n");
}

TEST_F(SessionRacesTest, OnlyTurnsOfTheSameSessionAreOvertaken) {
  const auto submit = [&](const std::string& id, const std::string& session) {
    ClientRequest request = Make(id, 10);
    request.session = Id(session);
    EXPECT_TRUE(core->Submit(request, now).ok());
    Drain();
  };
  submit("a", "s");
  submit("b", "t");
  submit("none", "");
  Tokens(kDecode, "b", {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
  EXPECT_FALSE(core->IsOvertaken("a"));
  EXPECT_FALSE(core->IsOvertaken("none"));
}

// ---- suspensions that end otherwise --------------------------------------------------------------

TEST_F(SessionRacesTest, AFailedSuspensionIsFollowedByALaterRecord) {
  Begin("s", 20);
  EXPECT_EQ(ReplyRecord(kDecode, 1, Old("s")), "2 <- Suspend 2 tokens=21\n");
  Reply(kDecode, 2);
  core->CallSession({.id = "c", .kind = Kind::kSuspend, .session = Id("s"), .name = "s"}, now);
  const mesh::SessionRecord suspended = Sent();
  Answer(3, kFull);
  const mesh::SessionRecord followed = Sent();
  EXPECT_EQ(followed.tokens_size(), 21);
  EXPECT_GT(followed.suspended_unix_ns(), suspended.suspended_unix_ns());
}

// The record may have been written.
TEST_F(SessionRacesTest, ASuspensionWhoseWorkerOrTimeIsLostIsFollowedToo) {
  Start(8);
  Begin("s", 10);
  Reply(kDecode, 1, kNone);
  EXPECT_EQ(Call(Kind::kSuspend, "s", "", false, absl::Seconds(1)), "2 <- Suspend 2 tokens=11\n");
  const std::string late = Wait(absl::Seconds(2));
  EXPECT_THAT(late, HasSubstr("DEADLINE_EXCEEDED"));
  EXPECT_THAT(late, HasSubstr("2 <- Suspend 3 tokens=11\n"));
  Reply(kDecode, 3);
  Begin("t", 20);
  Reply(kDecode, 4, kNone);
  EXPECT_EQ(Call(Kind::kSuspend, "t"), "2 <- Suspend 5 tokens=21\n");
  core->OnLinkClosed(kDecode, absl::UnavailableError("reset"), now);
  Drain();
  JoinWithStore(kDecode2, "d1", mesh::ROLE_DECODE);
  EXPECT_EQ(Wait(absl::Seconds(3), {kDecode2}), "4 <- Suspend 6 tokens=21\n");
}

// Nothing of the follower's may come later than a suspension.
TEST_F(SessionRacesTest, ASuspensionEndsWhatIsWrittenOfTheSession) {
  Begin("s", 20);
  EXPECT_EQ(ReplyRecord(kDecode, 1, Old("s")), "2 <- Suspend 2 tokens=21\n");
  EXPECT_EQ(Call(Kind::kSuspend, "s"), "2 <- Suspend 3 tokens=21\n");
  EXPECT_EQ(Reply(kDecode, 2, kFull), "");
  EXPECT_EQ(Wait(absl::Seconds(3)), "");
  EXPECT_EQ(core->counters().stale_messages, 1u);
}

// What was said while it was suspended is written after it, with the state only where it goes on from it.
TEST_F(SessionRacesTest, WhatWasSaidDuringASuspensionIsWrittenAfterIt) {
  for (const int first : {0, 7}) {
    Start(1);
    Begin("s", 100);
    Reply(kDecode, 1, kNone);
    EXPECT_EQ(Call(Kind::kSuspend, "s"), "2 <- Suspend 2 tokens=101\n");
    EXPECT_EQ(Begin("s", 80, first), "");
    Answer(2, absl::OkStatus(), 64);
    const mesh::SessionRecord followed = Sent();
    EXPECT_EQ(followed.tokens_size(), 81);
    EXPECT_EQ(followed.position(), first == 0 ? 64u : 0u);
  }
}

TEST_F(SessionRacesTest, ASessionThatBeginsOtherwiseLeavesItsStoredState) {
  for (const int first : {0, 7}) {
    Start(1);
    mesh::SessionRecord record = Old("s");
    Call(Kind::kOpen, "s");
    ReplyRecord(kDecode, 1, record);
    EXPECT_THAT(Reply(kDecode, 2), StartsWith("session c: 300 tokens"));
    ClientRequest request = Make("turn", 310);
    request.session = Id("s");
    request.prompt[0] = first;
    ASSERT_TRUE(core->Submit(request, now).ok());
    Drain();
    Tokens(kDecode, "turn", {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
    const mesh::SessionRecord followed = Sent();
    EXPECT_EQ(followed.tokens_size(), 311);
    EXPECT_EQ(followed.position(), first == 0 ? 256u : 0u);
  }
}

// ---- sessions that were pushed out ---------------------------------------------------------------

// Out of the table, its record is written from beside it, and an older one is refused from then on.
TEST_F(SessionRacesTest, ARecordThatWasWrittenAfterwardsIsRemembered) {
  Begin("s", 20);
  const mesh::SessionRecord old = Old("s");
  EXPECT_EQ(ReplyRecord(kDecode, 1, old), "2 <- Suspend 2 tokens=21\n");
  EXPECT_EQ(Begin("t", 10), "2 <- Read 3\n");
  EXPECT_EQ(Reply(kDecode, 2), "");
  EXPECT_EQ(Call(Kind::kGet, "s"), "2 <- Read 4\n");
  EXPECT_THAT(ReplyRecord(kDecode, 4, old), StartsWith("session c: DATA_LOSS"));
}

TEST_F(SessionRacesTest, WhatWasPushedOutGoesOnWithTheNextTurnTrimOrFork) {
  const auto push_out = [&] {  // s, while its record is being written
    Start(1);
    Begin("s", 20);
    EXPECT_EQ(ReplyRecord(kDecode, 1, Old("s")), "2 <- Suspend 2 tokens=21\n");
    EXPECT_EQ(Begin("t", 50), "2 <- Read 3\n");
    Reply(kDecode, 3, kNone);
  };
  push_out();
  Begin("s", 30);
  EXPECT_EQ(Reply(kDecode, 2, kFull), "");
  EXPECT_EQ(Wait(absl::Seconds(2)), "2 <- Suspend 4 tokens=31\n");
  push_out();
  core->TrimSession(Id("s"), "turn", 15, now);
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 15 tokens, position 0 at \"\" \n");
  push_out();
  EXPECT_EQ(Call(Kind::kFork, "t", "s", true),
            "session c: 51 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(Reply(kDecode, 2, kFull), "");
  EXPECT_EQ(Wait(absl::Seconds(2)), "2 <- Suspend 4 tokens=51\n");
}

// Pushed out while it is suspended, the session is there when that fails.
TEST_F(SessionRacesTest, AFailedSuspensionKeepsWhatWasPushedOut) {
  EXPECT_EQ(Begin("s", 20), "2 <- Read 1\n");
  EXPECT_EQ(Call(Kind::kSuspend, "s"), "2 <- Suspend 2 tokens=21\n");
  Begin("t", 10);
  EXPECT_THAT(Reply(kDecode, 2, kFull), StartsWith("session c: RESOURCE_EXHAUSTED"));
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 21 tokens, ended, position 0 at \"\" \n");
}

// What was lost is refused only until the name is begun anew.
TEST_F(SessionRacesTest, ALostNameThatIsBegunAnewIsKnownAgain) {
  RouterOptions options = DefaultOptions();
  options.sessions_max = 1;
  options.session_bytes_max = SessionTable::kEntryBytes + 200;
  Restart(options);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Begin("s", 200);  // more than all room
  EXPECT_EQ(core->counters().sessions.records_lost, 1u);
  EXPECT_EQ(Begin("s", 10), "2 <- Read 1\n");
  mesh::WorkerMessage m;
  m.mutable_session()->set_call(1);
  *m.mutable_session()->mutable_record() = Old("s");
  Send(kDecode, m);
  const mesh::SessionRecord followed = Sent();
  EXPECT_EQ(followed.tokens_size(), 11);
  Reply(kDecode, 2);
  EXPECT_EQ(Begin("t", 10), "2 <- Read 3\n");
  EXPECT_EQ(Call(Kind::kGet, "s"), "2 <- Read 4\n");
  EXPECT_THAT(ReplyRecord(kDecode, 4, followed), StartsWith("session c: 11 tokens"));
}

// ---- several stores ------------------------------------------------------------------------------

TEST_F(SessionRacesTest, AWriteThatFailedIsTriedAtAnotherStore) {
  JoinWithStore(kPrefill, "p1", mesh::ROLE_PREFILL);
  EXPECT_EQ(Begin("s", 20), "2 <- Read 1\n1 <- Read 1\n");
  Reply(kPrefill, 1, kNone);
  EXPECT_EQ(ReplyRecord(kDecode, 1, Old("s")), "2 <- Suspend 2 tokens=21\n");
  EXPECT_EQ(Reply(kDecode, 2, kFull), "");
  EXPECT_EQ(Wait(absl::Seconds(2), {kDecode, kPrefill}), "1 <- Suspend 3 tokens=21\n");
}

// The worker with the newest record of a name is away: what takes its place is later, however it comes to be.
TEST_F(SessionRacesTest, WhatTakesTheNewestRecordsPlaceIsLater) {
  Start(8);
  JoinWithStore(kPrefill, "p1", mesh::ROLE_PREFILL);
  for (const char* name : {"s", "t"}) {
    Call(Kind::kGet, name);
    const uint64_t call = name[0] == 's' ? 1 : 2;
    Reply(kDecode, call, kNone);
    EXPECT_THAT(ReplyRecord(kPrefill, call, Old(name)), StartsWith("session c: 300 tokens"));
  }
  core->OnLinkClosed(kPrefill, absl::UnavailableError("reset"), now);
  Drain();
  EXPECT_EQ(Begin("s", 20), "2 <- Read 3\n");
  core->CallSession({.id = "c", .kind = Kind::kSuspend, .session = Id("s"), .name = "s"}, now);
  EXPECT_GT(Sent().suspended_unix_ns(), Old("s").suspended_unix_ns());
  EXPECT_THAT(Reply(kDecode, 4, kFull), HasSubstr("session c: RESOURCE_EXHAUSTED"));
  // A fork that asked: the store that is here has none.
  EXPECT_EQ(Call(Kind::kFork, "s", "t"), "2 <- Read 6\n");
  Answer(6, kNone);
  const std::string said = Drain();
  EXPECT_THAT(said, HasSubstr("session c: 21 tokens"));
  EXPECT_THAT(said, HasSubstr("2 <- Read 7\n"));
  Answer(7, kNone);
  EXPECT_GT(Sent().suspended_unix_ns(), Old("t").suspended_unix_ns());
}

}  // namespace
}  // namespace deltamesh
