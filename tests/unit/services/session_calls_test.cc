// Sessions in the router's core, as transcripts: what clients ask, what workers are told, what comes back.
#include "services/router/session_calls.h"

#include "tests/unit/services/session_harness.h"

namespace deltamesh {
namespace {

TEST_F(SessionCallsTest, AFinishedTurnIsTheSessionsContent) {
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  EXPECT_EQ(Call(Kind::kGet, "s").substr(0, 32), "session c: NOT_FOUND: session: \"");
  Turn("s", 60, {5, 6, 7});
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 63 tokens, ended, position 0 at \"\" \n");
  Turn("s", 50, {5, 6, 7, 8, 9, 10, 11, 12}, mesh::SequenceOutput::MAX_TOKENS);
  EXPECT_EQ(Call(Kind::kOpen, "s"), "session c: 58 tokens, position 0 at \"\" \n");
  EXPECT_EQ(core->gauges().sessions, 1);
  EXPECT_EQ(Refused(SessionRefusal::kNotFound), 1u);
}

TEST_F(SessionCallsTest, CutAnswersCountAsFarAsTheyCame) {
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  const auto begin = [&](const std::string& id) {
    ClientRequest request = Make(id, 10);
    request.session = Id("s");
    ASSERT_TRUE(core->Submit(request, now).ok());
    Drain();
  };
  // Nothing was said: no turn.
  begin("a");
  core->CancelClient("a", now);
  EXPECT_EQ(core->gauges().sessions, 0);
  // The client left after two tokens.
  begin("b");
  Tokens(kDecode, "b", {1, 2}, 0);
  core->CancelClient("b", now);
  Drain();
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 12 tokens, position 0 at \"\" \n");
  // A stop string matched in the third of four.
  begin("d");
  Tokens(kDecode, "d", {1, 2, 3, 4}, 0);
  core->CompleteClient("d", 3, now);
  Drain();
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 13 tokens, position 0 at \"\" \n");
  // A lost worker leaves the session as it was.
  begin("e");
  Tokens(kDecode, "e", {1}, 0);
  core->OnLinkClosed(kDecode, absl::UnavailableError("reset"), now);
  Drain();
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 13 tokens, position 0 at \"\" \n");
}

// A name is begun anew while a turn of it is answered: what began last counts, whichever ends last.
TEST_F(SessionCallsTest, ATurnThatWasOvertakenIsNotKept) {
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 60, {5});
  const auto begin = [&](const std::string& id, int64_t prompt, bool append) {
    ClientRequest request = Make(id, prompt);
    request.session = Id("s");
    request.append = append;
    ASSERT_TRUE(core->Submit(request, now).ok());
    Drain();
  };
  const auto end = [&](const std::string& id) {
    Tokens(kDecode, id, {5}, 0, mesh::SequenceOutput::STOP_TOKEN);
    bool overtaken = false;
    for (const RouterAction& action : core->TakeActions()) {
      const auto* finished = std::get_if<ClientFinished>(&action);
      if (finished != nullptr) overtaken = finished->overtaken;
    }
    return overtaken;
  };
  begin("append", 70, true);
  begin("anew", 20, false);
  EXPECT_FALSE(end("anew"));
  EXPECT_TRUE(core->IsOvertaken("append"));
  EXPECT_TRUE(end("append"));
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 21 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(core->counters().sessions.kept, 2u);
  EXPECT_EQ(core->counters().sessions.overtaken, 1u);
  // In order both count.
  begin("append", 30, true);
  begin("anew", 40, false);
  EXPECT_FALSE(end("append"));
  EXPECT_FALSE(end("anew"));
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 41 tokens, ended, position 0 at \"\" \n");
  // Nor is one that is cut.
  begin("append", 50, true);
  Tokens(kDecode, "append", {1, 2}, 0);
  begin("anew", 10, false);
  EXPECT_FALSE(end("anew"));
  core->CancelClient("append", now);
  Drain();
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 11 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(core->counters().sessions.overtaken, 2u);
}

TEST_F(SessionCallsTest, ARunningTurnKeepsOthersOut) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 10, {1});
  ClientRequest request = Make("a", 12);
  request.session = Id("s");
  ASSERT_TRUE(core->Submit(request, now).ok());
  Drain();
  for (const Kind kind : {Kind::kSuspend, Kind::kOpen}) {
    EXPECT_EQ(
        Call(kind, "s"),
        "session c: FAILED_PRECONDITION: session: a turn of \"s\" is being answered; wait for "
        "its end or cancel it\n");
  }
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 11 tokens, ended, running, position 0 at \"\" \n");
  EXPECT_EQ(Call(Kind::kFork, "t", "s", true).substr(0, 31), "session c: FAILED_PRECONDITION:");
  EXPECT_EQ(Refused(SessionRefusal::kRunning), 3u);
}

TEST_F(SessionCallsTest, SuspendingTakesWhatHoldsMostAndIsExclusive) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 60, {60, 61, 62, 63, 64, 65});
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  Hold(kDecode2, 1);
  EXPECT_EQ(Call(Kind::kSuspend, "s"), "4 <- Suspend 2 tokens=66\n");
  SessionCall open;
  open.id = "other";
  open.kind = Kind::kOpen;
  open.session = Id("s");
  open.name = "s";
  core->CallSession(open, now);
  EXPECT_EQ(
      Drain(),
      "session other: FAILED_PRECONDITION: session: \"s\" is being suspended; call again when "
      "it is\n");
  EXPECT_EQ(Reply(kDecode, 2), "");  // not asked
  EXPECT_EQ(Reply(kDecode2, 9), "");
  EXPECT_EQ(core->counters().stale_messages, 2u);
  EXPECT_EQ(Reply(kDecode2, 2, {},
                  [](auto* reply) {
                    reply->set_position(64);
                    reply->set_bytes(1000);
                    reply->set_tier("disk");
                  }),
            "session c: 66 tokens, ended, suspended, position 64 at \"d2\" disk\n");
  EXPECT_EQ(core->gauges().sessions, 0);
  EXPECT_EQ(core->counters().sessions.suspended, 1u);
  EXPECT_EQ(Reply(kDecode2, 2), "");  // twice
  EXPECT_EQ(core->counters().stale_messages, 3u);
}

// The worker may write the record of a suspension that nobody waits for: were it forgotten here, the session
// would fall back to it later.
TEST_F(SessionCallsTest, AnAbandonedSuspensionsRecordFollowsTheSession) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 10, {1});
  EXPECT_EQ(Call(Kind::kSuspend, "s"), "2 <- Suspend 2 tokens=11\n");
  core->CancelSessionCall("c", now);
  const std::string left = Drain();
  EXPECT_NE(left.find("2 <- Suspend 3 tokens=11"), std::string::npos) << left;
  EXPECT_EQ(Reply(kDecode, 2), "");
  EXPECT_EQ(Reply(kDecode, 3), "");
  ClientRequest request = Make("turn", 20);
  request.session = Id("s");
  ASSERT_TRUE(core->Submit(request, now).ok());
  Drain();
  Tokens(kDecode, "turn", {1}, 0, mesh::SequenceOutput::STOP_TOKEN);
  const std::string after = Drain();
  EXPECT_NE(after.find("Suspend 4 tokens=21"), std::string::npos) << after;
}

TEST_F(SessionCallsTest, WhatWasSaidDuringASuspensionIsNotForgotten) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 10, {1});
  EXPECT_EQ(Call(Kind::kSuspend, "s"), "2 <- Suspend 2 tokens=11\n");
  Turn("s", 20, {1});  // not appended: nobody can forbid it
  Reply(kDecode, 2);
  EXPECT_EQ(Call(Kind::kGet, "s"), "session c: 21 tokens, ended, position 0 at \"\" \n");
}

TEST_F(SessionCallsTest, WithoutAStoreNothingIsSuspended) {
  Join(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 10, {1});
  const std::string said = Call(Kind::kSuspend, "s");
  EXPECT_THAT(said, ::testing::StartsWith("session c: FAILED_PRECONDITION"));
  EXPECT_THAT(said, ::testing::HasSubstr("--store-dir"));
  EXPECT_EQ(Refused(SessionRefusal::kNoStore), 1u);
  EXPECT_EQ(core->gauges().sessions, 1);
}

TEST_F(SessionCallsTest, AFailedSuspensionKeepsTheSession) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 10, {1});
  Call(Kind::kSuspend, "s");
  EXPECT_EQ(
      Reply(kDecode, 2, absl::ResourceExhaustedError("the disk is full")),
      "session c: RESOURCE_EXHAUSTED: session \"s\" stays in memory: worker \"d1\": the disk is "
      "full\n");
  EXPECT_EQ(core->gauges().sessions, 1);
  // A bound that passes by itself is another matter: the worker says when to come again.
  Call(Kind::kSuspend, "s");
  mesh::WorkerMessage busy;
  busy.mutable_session()->set_call(3);
  busy.mutable_session()->set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
  busy.mutable_session()->set_message("64 session commands are going on");
  busy.mutable_session()->set_retry_after_ms(1500);
  Send(kDecode, busy);
  EXPECT_EQ(Drain(),
            "session c: RESOURCE_EXHAUSTED: session \"s\" stays in memory: worker \"d1\": 64 "
            "session commands are going on [again in 1.5s]\n");
  Call(Kind::kSuspend, "s");
  core->OnLinkClosed(kDecode, absl::UnavailableError("reset"), now);
  EXPECT_THAT(Drain(), ::testing::HasSubstr(
                           "session c: UNAVAILABLE: worker \"d1\" was lost: reset; call again"));
  EXPECT_EQ(core->gauges().session_calls, 0);
}

TEST_F(SessionCallsTest, ResumingAsksEveryStoreAndLoadsTheState) {
  JoinWithStore(kPrefill, "p1", mesh::ROLE_PREFILL);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Join(kDecode2, "d2", mesh::ROLE_DECODE);  // without a store: not asked
  EXPECT_EQ(Call(Kind::kResume, "s"), "2 <- Read 1\n1 <- Read 1\n");
  EXPECT_EQ(Reply(kDecode, 1, absl::NotFoundError("none")), "");
  EXPECT_EQ(ReplyRecord(kPrefill, 1, Record("s", 100, 64)), "2 <- Load 2 tokens=100\n");
  EXPECT_EQ(Reply(kDecode, 2, {},
                  [](auto* reply) {
                    reply->set_position(64);
                    reply->set_tier("disk");
                  }),
            "session c: 100 tokens, ended, position 64 at \"d1\" disk\n");
  EXPECT_EQ(core->counters().sessions.resumed, 1u);
  EXPECT_EQ(core->gauges().sessions, 1);
  // Again: it lives, and its state is in memory.
  Hold(kDecode, 1);
  EXPECT_EQ(Call(Kind::kResume, "s"),
            "session c: 100 tokens, ended, position 64 at \"d1\" memory\n");
  EXPECT_EQ(core->counters().sessions.resumed, 1u);
}

// One worker holds two states of the session: each is told, and the deeper one is read for it.
TEST_F(SessionCallsTest, ADeeperStateOnDiskHidesNoneInMemory) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 200, {200, 201});
  Hold(kDecode, 3, /*cold=*/true, /*warm=*/2);
  SessionCall get;
  get.id = "g";
  get.kind = Kind::kGet;
  get.session = Id("s");
  core->CallSession(get, now);
  std::vector<SessionHolding> holders;
  for (const RouterAction& action : core->TakeActions()) {
    if (const auto* a = std::get_if<SessionAnswered>(&action)) holders = a->state.holders;
  }
  ASSERT_EQ(holders.size(), 2u);
  EXPECT_EQ(holders[0].worker, "d1");
  EXPECT_EQ(holders[0].position, 192);
  EXPECT_TRUE(holders[0].cold);
  EXPECT_EQ(holders[1].worker, "d1");
  EXPECT_EQ(holders[1].position, 128);
  EXPECT_FALSE(holders[1].cold);
  EXPECT_THAT(Call(Kind::kResume, "s"), ::testing::HasSubstr("2 <- Load"));
}

TEST_F(SessionCallsTest, TheNewestRecordWinsAndSilenceMayHideANewerOne) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  mesh::SessionRecord older = Record("s", 20, 0), newer = Record("s", 30, 0);
  newer.set_suspended_unix_ns(7);
  for (const bool first : {true, false}) {
    const uint64_t call = first ? 1 : 2;
    Call(Kind::kGet, "s");
    EXPECT_EQ(ReplyRecord(kDecode2, call, first ? newer : older), "");
    EXPECT_EQ(ReplyRecord(kDecode, call, first ? older : newer),
              "session c: 30 tokens, ended, suspended, position 0 at \"\" \n");
  }
  Call(Kind::kOpen, "s");
  EXPECT_EQ(ReplyRecord(kDecode, 3, older), "");
  Pass(absl::Seconds(6), {kDecode, kDecode2});
  EXPECT_THAT(Drain(), ::testing::HasSubstr("UNAVAILABLE: worker \"d2\" did not say"));
  EXPECT_EQ(ReplyRecord(kDecode2, 3, newer), "");
  EXPECT_EQ(core->counters().stale_messages, 1u);
  // A store that failed said no more than a silent one.
  Call(Kind::kOpen, "s");
  EXPECT_EQ(ReplyRecord(kDecode, 4, older), "");
  EXPECT_EQ(
      Reply(kDecode2, 4, absl::UnavailableError("no bucket")),
      "session c: UNAVAILABLE: worker \"d2\" did not say whether it has session \"s\" (worker "
      "\"d2\": no bucket); call again [again in 1s]\n");
  Call(Kind::kGet, "s");
  EXPECT_EQ(Reply(kDecode, 5, absl::NotFoundError("none")), "");
  EXPECT_THAT(Reply(kDecode2, 5, absl::InternalError("input/output error")),
              ::testing::StartsWith("session c: UNAVAILABLE"));
}

// Two appends to a suspended session at once: one is the next turn, the other is told so.
TEST_F(SessionCallsTest, OneTurnIsOpenedAtATime) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  EXPECT_EQ(Call(Kind::kOpen, "s"), "2 <- Read 1\n");
  for (const Kind kind : {Kind::kOpen, Kind::kSuspend}) {
    SessionCall second;
    second.id = "second";
    second.kind = kind;
    second.session = Id("s");
    second.name = "s";
    core->CallSession(second, now);
    EXPECT_THAT(Drain(),
                ::testing::StartsWith("session second: FAILED_PRECONDITION: session: a turn"));
  }
  EXPECT_EQ(ReplyRecord(kDecode, 1, Record("s", 30, 0)),
            "session c: 30 tokens, ended, position 0 at \"\" \n");
  ClientRequest request = Make("a", 31);
  request.session = Id("s");
  request.append = true;
  EXPECT_TRUE(core->Submit(request, now).ok());
  Drain();
  request.request_id = "b";
  EXPECT_EQ(core->Submit(request, now).code(), absl::StatusCode::kFailedPrecondition);
}

// What is said after a session came back is in the store too: forgotten here, it does not come back older.
TEST_F(SessionCallsTest, TheRecordFollowsTheSession) {
  RouterOptions options = DefaultOptions();
  options.sessions_max = 1;
  Restart(options);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  mesh::SessionRecord record = Record("s", 100, 64);
  record.set_key(std::string(16, 'k'));
  record.set_suspended_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(now + absl::Hours(1))));
  Call(Kind::kOpen, "s");
  ReplyRecord(kDecode, 1, record);
  Reply(kDecode, 2);
  ClientRequest request = Make("turn", 110);
  request.session = Id("s");
  ASSERT_TRUE(core->Submit(request, now).ok());
  Drain();
  Tokens(kDecode, "turn", {1, 2}, 0, mesh::SequenceOutput::STOP_TOKEN);
  mesh::SessionRecord followed;
  for (const RouterAction& action : core->TakeActions()) {
    const auto* sent = std::get_if<SendToWorker>(&action);
    if (sent != nullptr && sent->message.session().has_suspend()) {
      EXPECT_EQ(sent->message.session().call(), 3u);
      followed = sent->message.session().suspend().record();
    }
  }
  EXPECT_EQ(followed.tokens_size(), 112);
  EXPECT_EQ(followed.position(), 64u);
  EXPECT_EQ(followed.key(), record.key());
  EXPECT_GT(followed.suspended_unix_ns(), record.suspended_unix_ns());  // whatever the clocks say
  EXPECT_EQ(Reply(kDecode, 3, absl::ResourceExhaustedError("full")), "");
  EXPECT_EQ(Refused(SessionRefusal::kStore), 1u);
  Pass(absl::Seconds(2), {kDecode});
  EXPECT_EQ(Drain(), "2 <- Suspend 4 tokens=112\n");
  Reply(kDecode, 4);
  followed.set_suspended_unix_ns(followed.suspended_unix_ns() + 1);  // as it was sent again
  Turn("other", 10, {1});                                            // pushes it out
  Call(Kind::kGet, "s");
  EXPECT_EQ(ReplyRecord(kDecode, 6, followed),
            "session c: 112 tokens, ended, suspended, position 64 at \"\" \n");
}

TEST_F(SessionCallsTest, BadRecordsAreRefusedByName) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  uint64_t call = 0;
  const auto ask = [&](const std::function<void(mesh::SessionRecord*)>& spoil) {
    Call(Kind::kResume, "s");
    ++call;
    mesh::SessionRecord record = Record("s", 30, 0);
    spoil(&record);
    const std::string first = ReplyRecord(kDecode, call, record);
    return first + Reply(kDecode2, call, absl::NotFoundError("none"));
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(ask([](auto* r) { r->set_digest("d2"); }), HasSubstr("DATA_LOSS"));
  EXPECT_THAT(ask([](auto* r) { r->set_digest("d2"); }), HasSubstr("of model d2"));
  EXPECT_THAT(ask([](auto* r) { r->set_version(7); }), HasSubstr("version 7"));
  EXPECT_THAT(ask([](auto* r) { r->set_session(Id("t")); }), HasSubstr("another session"));
  EXPECT_THAT(ask([](auto* r) { r->set_tokens(3, -1); }), HasSubstr("impossible"));
  EXPECT_THAT(ask([](auto* r) { r->clear_tokens(); }), HasSubstr("no tokens"));
  EXPECT_THAT(ask([](auto* r) { r->set_position(31); }), HasSubstr("impossible"));
  EXPECT_GT(Refused(SessionRefusal::kForeign), 0u);
  EXPECT_GT(Refused(SessionRefusal::kDamaged), 0u);
  EXPECT_EQ(core->gauges().sessions, 0);
  // A damaged copy does not hide a good one.
  Call(Kind::kResume, "s");
  ++call;
  EXPECT_EQ(Reply(kDecode, call, absl::DataLossError("checksum")), "");
  EXPECT_EQ(ReplyRecord(kDecode2, call, Record("s", 30, 0)),
            "session c: 30 tokens, ended, position 0 at \"\" \n");
}

TEST_F(SessionCallsTest, ALostLoaderEndsAResumeAndNotATurn) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  Call(Kind::kResume, "s");
  EXPECT_EQ(Reply(kDecode, 1, absl::NotFoundError("none")), "");
  EXPECT_EQ(ReplyRecord(kDecode2, 1, Record("s", 100, 64)), "4 <- Load 2 tokens=100\n");
  core->OnLinkClosed(kDecode2, absl::UnavailableError("reset"), now);
  EXPECT_THAT(Drain(), ::testing::HasSubstr("UNAVAILABLE: worker \"d2\" was lost"));
  Call(Kind::kOpen, "t");
  EXPECT_EQ(ReplyRecord(kDecode, 3, Record("t", 100, 64)), "2 <- Load 4 tokens=100\n");
  EXPECT_EQ(Reply(kDecode, 4, absl::DataLossError("checksum")),
            "session c: 100 tokens, ended, position 0 at \"\" \n");
}

// A turn that names the session and is not appended waits for nobody: what it says is newer than the record
// whose state is being loaded, also once it was pushed out of the table.
TEST_F(SessionCallsTest, WhatIsSaidWhileAStateLoadsIsTheAnswer) {
  for (const Kind kind : {Kind::kResume, Kind::kOpen}) {
    for (const bool pushed_out : {false, true}) {
      RouterOptions options = DefaultOptions();
      options.sessions_max = 1;
      Restart(options);
      JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
      Call(kind, "s");
      EXPECT_EQ(ReplyRecord(kDecode, 1, Record("s", 100, 64)), "2 <- Load 2 tokens=100\n");
      Turn("s", 20, {1});  // its record is written under 3
      if (pushed_out) Turn("t", 10, {1});
      EXPECT_EQ(Reply(kDecode, 2, {},
                      [](auto* reply) {
                        reply->set_position(64);
                        reply->set_tier("disk");
                      }),
                "session c: 21 tokens, ended, position 0 at \"\" \n");
    }
  }
}

TEST_F(SessionCallsTest, ForksShareTokensAndAskBeforeTheyReplace) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 10, {1});
  EXPECT_EQ(Call(Kind::kFork, "s", "t"), "2 <- Read 2\n");
  EXPECT_EQ(Reply(kDecode, 2, absl::NotFoundError("none")),
            "session c: 11 tokens, ended, position 0 at \"\" \n");
  Turn("s", 20, {1});
  EXPECT_EQ(Call(Kind::kGet, "t"), "session c: 11 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(Call(Kind::kFork, "s", "t"),
            "session c: ALREADY_EXISTS: new_session: \"t\" exists; use another name, or set "
            "replace\n");
  EXPECT_EQ(Call(Kind::kFork, "s", "t", true),
            "session c: 21 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(Call(Kind::kFork, "s", "s").substr(0, 28), "session c: INVALID_ARGUMENT:");
  Call(Kind::kFork, "s", "u");
  EXPECT_EQ(ReplyRecord(kDecode, 3, Record("u", 9, 0)),
            "session c: ALREADY_EXISTS: new_session: \"u\" is suspended; use another name, or set "
            "replace\n");
  EXPECT_EQ(core->counters().sessions.forked, 2u);
  // From a suspended one, which stays suspended.
  EXPECT_EQ(Call(Kind::kFork, "x", "y"), "2 <- Read 4\n");
  EXPECT_EQ(ReplyRecord(kDecode, 4, Record("x", 9, 0)), "2 <- Read 5\n");
  EXPECT_EQ(Reply(kDecode, 5, absl::NotFoundError("none")),
            "session c: 9 tokens, ended, suspended, position 0 at \"\" \n");
  EXPECT_EQ(core->gauges().sessions, 3);
}

TEST_F(SessionCallsTest, DeadlinesCancelsAndBounds) {
  RouterOptions options = DefaultOptions();
  options.session_calls_max = 3;
  Restart(options);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  EXPECT_EQ(Call(Kind::kGet, "s", "", false, absl::ZeroDuration()),
            "session c: DEADLINE_EXCEEDED: the deadline passed before the call began\n");
  Call(Kind::kGet, "s", "", false, absl::Seconds(1));
  Pass(absl::Seconds(2), {kDecode});
  EXPECT_THAT(Drain(), ::testing::HasSubstr("DEADLINE_EXCEEDED: session \"s\""));
  Call(Kind::kGet, "s");
  core->CancelSessionCall("c", now);
  EXPECT_EQ(Drain(), "session c: CANCELLED: the client left\n");
  core->CancelSessionCall("c", now);
  EXPECT_EQ(Drain(), "");
  const auto ask = [&](const std::string& id, const std::string& tenant) {
    SessionCall call;
    call.id = id;
    call.session = Id("s");
    call.salt = tenant;
    core->CallSession(call, now);
    return Drain();
  };
  EXPECT_EQ(ask("x", ""), "2 <- Read 3\n");
  EXPECT_EQ(ask("y", ""), "2 <- Read 4\n");
  EXPECT_EQ(ask("z", ""),
            "session z: RESOURCE_EXHAUSTED: 2 session calls are going on, the router's bound for a "
            "tenant; retry later [again in 1s]\n");
  EXPECT_EQ(ask("v", "other"), "2 <- Read 5\n");
  EXPECT_EQ(ask("w", "third"),
            "session w: RESOURCE_EXHAUSTED: 3 session calls are going on, the router's bound; "
            "retry later [again in 1s]\n");
  EXPECT_EQ(core->gauges().session_calls, 3);
}

// What is in memory needs no place.
TEST_F(SessionCallsTest, CallsThatNeedNoStoreAreAnsweredWhileOthersWait) {
  RouterOptions options = DefaultOptions();
  options.session_calls_max = 1;
  Restart(options);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("known", 10, {1});
  SessionCall waits;
  waits.id = "w";
  waits.session = Id("unknown");
  core->CallSession(waits, now);
  EXPECT_THAT(Drain(), ::testing::HasSubstr("Read"));
  EXPECT_THAT(Call(Kind::kGet, "known"), ::testing::HasSubstr("session c: 11 tokens"));
  EXPECT_THAT(Call(Kind::kSuspend, "known"), ::testing::HasSubstr("RESOURCE_EXHAUSTED"));
}

TEST(SessionTableTest, ForgetsTheLeastRecentlyUsedWithinItsBounds) {
  SessionTable table(3, SessionTable::kEntryBytes * 4 + 400);
  const absl::Time now = absl::FromUnixSeconds(1);
  const auto tokens = [](size_t n) { return std::make_shared<const std::vector<TokenId>>(n); };
  for (const char* id : {"a", "b", "c"}) EXPECT_TRUE(table.Put(id, "", tokens(10), false, now));
  table.Touch("a", now);
  EXPECT_TRUE(table.Put("d", "", tokens(10), false, now));
  EXPECT_EQ(table.Find("b"), nullptr);
  EXPECT_NE(table.Find("a"), nullptr);
  EXPECT_EQ(table.evicted(), 1u);
  const uint64_t version = table.Find("a")->version;
  EXPECT_TRUE(table.Put("a", "", tokens(150), true, now));
  EXPECT_NE(table.Find("a")->version, version);
  EXPECT_TRUE(table.Put("e", "", tokens(60), true, now));  // bytes, not entries
  EXPECT_EQ(table.sessions(), 2);
  EXPECT_FALSE(table.Put("e", "", tokens(1000), true, now));
  EXPECT_EQ(table.Find("e"), nullptr);
  table.Erase("a");
  EXPECT_EQ(table.sessions(), 0);
  EXPECT_EQ(table.bytes(), 0);
}

TEST(SessionTableTest, ATenantPushesOutItsOwn) {
  SessionTable table(6, 1 << 20);
  const absl::Time now = absl::FromUnixSeconds(1);
  const auto tokens = std::make_shared<const std::vector<TokenId>>(10);
  table.Put("mine", "quiet", tokens, false, now);
  for (int i = 0; i < 50; ++i) table.Put("s" + std::to_string(i), "loud", tokens, false, now);
  EXPECT_NE(table.Find("mine"), nullptr);
  EXPECT_EQ(table.sessions(), 6);
  EXPECT_EQ(table.evicted(), 45u);
  EXPECT_EQ(table.Find("s44"), nullptr);
  EXPECT_NE(table.Find("s45"), nullptr);
  for (int i = 0; i < 2; ++i) table.Put("t" + std::to_string(i), "third", tokens, false, now);
  EXPECT_NE(table.Find("mine"), nullptr);
  EXPECT_NE(table.Find("t0"), nullptr);
}

// A bound is kept by the tenant that takes most of what it bounds.
TEST(SessionTableTest, ManySmallSessionsDoNotPushOutAFewLargeOnes) {
  const absl::Time now = absl::FromUnixSeconds(1);
  const auto few = std::make_shared<const std::vector<TokenId>>(10);
  const auto many = std::make_shared<const std::vector<TokenId>>(10000);
  SessionTable entries(6, 1 << 20);
  entries.Put("mine", "quiet", many, false, now);
  for (int i = 0; i < 50; ++i) entries.Put("s" + std::to_string(i), "loud", few, false, now);
  EXPECT_NE(entries.Find("mine"), nullptr);
  EXPECT_EQ(entries.sessions(), 6);
  EXPECT_EQ(entries.Find("s44"), nullptr);
  EXPECT_NE(entries.Find("s45"), nullptr);
  // Nor do a few large ones push out many small ones, also where both bounds are reached.
  const int64_t large = SessionTable::kEntryBytes + 10000 * static_cast<int64_t>(sizeof(TokenId));
  SessionTable bytes(5, 2 * large);
  for (int i = 0; i < 4; ++i) bytes.Put("s" + std::to_string(i), "small", few, false, now);
  for (int i = 0; i < 50; ++i) bytes.Put("l" + std::to_string(i), "large", many, false, now);
  for (int i = 0; i < 4; ++i) EXPECT_NE(bytes.Find("s" + std::to_string(i)), nullptr) << i;
  EXPECT_NE(bytes.Find("l49"), nullptr);
}

TEST(SessionIdTest, SaltAndNameAreBothInIt) {
  EXPECT_EQ(Id("s").size(), 32u);
  EXPECT_NE(Id("s", "t"), Id("s"));
  EXPECT_NE(Id("ab", "c"), Id("b", "ca"));
  EXPECT_NE(SessionNumber(Id("s")), 0u);
  // Stores tell by its beginning whose it is; hints do not.
  EXPECT_EQ(Id("s", "t").substr(0, kSessionTenantBytes),
            Id("r", "t").substr(0, kSessionTenantBytes));
  EXPECT_NE(Id("s", "t").substr(0, kSessionTenantBytes), Id("s").substr(0, kSessionTenantBytes));
  EXPECT_NE(SessionNumber(Id("s", "t")), SessionNumber(Id("r", "t")));
}

}  // namespace
}  // namespace deltamesh
