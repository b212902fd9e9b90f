// What a router takes from stores that are silent, away or gone, as transcripts.
#include "services/router/session_stores.h"

#include "services/router/record_stamps.h"
#include "tests/unit/services/session_harness.h"

namespace deltamesh {
namespace {

TEST_F(SessionCallsTest, SilentAndLostStoresAreUnavailableNotAbsent) {
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  Call(Kind::kGet, "s");
  Reply(kDecode, 1, absl::NotFoundError("none"));
  Pass(absl::Seconds(4), {kDecode, kDecode2});
  EXPECT_EQ(Drain(), "");
  Pass(absl::Seconds(2), {kDecode, kDecode2});
  EXPECT_EQ(Drain(),
            "session c: UNAVAILABLE: worker \"d2\" did not say whether it has session \"s\"; call "
            "again [again in 1s]\n");
  EXPECT_EQ(Reply(kDecode2, 1), "");
  EXPECT_EQ(core->counters().stale_messages, 1u);
  Call(Kind::kGet, "s");
  Reply(kDecode, 2, absl::NotFoundError("none"));
  core->OnLinkClosed(kDecode2, absl::UnavailableError("reset"), now);
  EXPECT_THAT(Drain(), ::testing::HasSubstr("UNAVAILABLE: worker \"d2\" did not say"));
}

// Clients begin a conversation anew when they hear NOT_FOUND, and what they begin takes its record's place.
TEST_F(SessionCallsTest, WithoutAStoreThatWasKnownASessionIsUnavailableNotAbsent) {
  using ::testing::HasSubstr;
  for (const Kind kind : {Kind::kOpen, Kind::kGet, Kind::kResume, Kind::kSuspend, Kind::kFork}) {
    EXPECT_THAT(Call(kind, "s", kind == Kind::kFork ? "t" : ""),
                HasSubstr("session c: UNAVAILABLE: no worker is connected"));
  }
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  core->OnLinkClosed(kDecode2, absl::UnavailableError("reset"), now);
  Drain();
  EXPECT_EQ(Call(Kind::kOpen, "s"), "2 <- Read 6\n");
  EXPECT_EQ(Reply(kDecode, 6, absl::NotFoundError("none")),
            "session c: UNAVAILABLE: worker \"d2\" may have session \"s\" in its store and is not "
            "connected; call again when it is, or begin the session anew; in 1h it counts as gone "
            "(--store-forget-minutes)\n");
  core->OnLinkClosed(kDecode, absl::UnavailableError("reset"), now);
  Join(kPrefill, "p1", mesh::ROLE_PREFILL);  // without a store: it cannot say
  EXPECT_THAT(Call(Kind::kOpen, "s"), HasSubstr("session c: UNAVAILABLE: worker \"d1\" may"));
  EXPECT_EQ(Refused(SessionRefusal::kNotFound), 0u);
  JoinWithStore(5, "d1", mesh::ROLE_DECODE);
  JoinWithStore(6, "d2", mesh::ROLE_DECODE);
  EXPECT_EQ(Call(Kind::kOpen, "s"), "5 <- Read 8\n6 <- Read 8\n");
  Reply(5, 8, absl::NotFoundError("none"));
  EXPECT_THAT(Reply(6, 8, absl::NotFoundError("none")), HasSubstr("session c: NOT_FOUND"));
}

// A worker that was retired must not make names unavailable for as long as the router lives; one that drains
// and is restarted with the same disk is waited for.
TEST_F(SessionCallsTest, AStoreThatStaysAwayCountsAsGone) {
  using ::testing::HasSubstr;
  using ::testing::StartsWith;
  RouterOptions options = DefaultOptions();
  options.store_forget = absl::Minutes(2);
  Restart(options);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  Join(kPrefill, "p1", mesh::ROLE_PREFILL);  // without a store: nobody misses it
  core->OnLinkClosed(kPrefill, absl::UnavailableError("reset"), now);
  EXPECT_EQ(core->gauges().stores, 2);
  EXPECT_EQ(core->gauges().stores_away, 0);
  Beat(kDecode2, 4, 64, 0, /*draining=*/true);
  core->OnLinkClosed(kDecode2, absl::UnavailableError("it drained"), now);
  Drain();
  uint64_t call = 0;
  const auto ask = [&] {
    const std::string said = Call(Kind::kOpen, "s");
    EXPECT_EQ(said, absl::StrFormat("2 <- Read %d\n", ++call));
    return Reply(kDecode, call, absl::NotFoundError("none"));
  };
  EXPECT_THAT(ask(), HasSubstr("UNAVAILABLE: worker \"d2\" may"));
  Pass(absl::Seconds(119), {kDecode});
  EXPECT_THAT(ask(), HasSubstr("; in 1s it counts as gone"));
  EXPECT_EQ(core->gauges().stores_away, 1);
  EXPECT_EQ(core->counters().sessions.stores_forgotten, 0u);
  Pass(absl::Seconds(1), {kDecode});
  EXPECT_THAT(ask(), StartsWith("session c: NOT_FOUND"));
  EXPECT_EQ(core->gauges().stores_away, 0);
  Pass(absl::Minutes(10), {kDecode});
  EXPECT_EQ(core->counters().sessions.stores_forgotten, 1u);
  // It is back: what it has is known, and its time begins anew when it leaves.
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  EXPECT_EQ(Call(Kind::kGet, "s"), absl::StrFormat("2 <- Read %1$d\n4 <- Read %1$d\n", ++call));
  Reply(kDecode, call, absl::NotFoundError("none"));
  EXPECT_EQ(ReplyRecord(kDecode2, call, Record("s", 30, 0)),
            "session c: 30 tokens, ended, suspended, position 0 at \"\" \n");
  core->OnLinkClosed(kDecode2, absl::UnavailableError("reset"), now);
  Drain();
  EXPECT_THAT(ask(), HasSubstr("; in 2m it counts as gone"));
  // Its name without a store: there is nothing to wait for.
  Join(kDecode2, "d2", mesh::ROLE_DECODE, 2);
  EXPECT_THAT(ask(), StartsWith("session c: NOT_FOUND"));
  EXPECT_EQ(core->counters().sessions.stores_forgotten, 1u);
}

// What it had was the newest: an older record of another is refused, now for good.
TEST_F(SessionCallsTest, WithAStoreThatIsGoneAnOlderRecordIsDataLoss) {
  RouterOptions options = DefaultOptions();
  options.store_forget = kRedialMax;
  Restart(options);
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  mesh::SessionRecord newest = Record("s", 66, 0);
  newest.set_suspended_unix_ns(7);
  Call(Kind::kGet, "s");
  Reply(kDecode, 1, absl::NotFoundError("none"));
  ReplyRecord(kDecode2, 1, newest);
  core->OnLinkClosed(kDecode2, absl::UnavailableError("reset"), now);
  Pass(2 * kRedialMax, {kDecode});
  Drain();
  Call(Kind::kOpen, "s");
  EXPECT_THAT(ReplyRecord(kDecode, 2, Record("s", 30, 0)),
              ::testing::HasSubstr("session c: DATA_LOSS: session: no store has the newest"));
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  Call(Kind::kGet, "s");
  ReplyRecord(kDecode2, 3, newest);
  EXPECT_EQ(ReplyRecord(kDecode, 3, Record("s", 30, 0)),
            "session c: 66 tokens, ended, suspended, position 0 at \"\" \n");
}

// Workers whose names never come back must not be remembered without bound.
TEST(KnownStoresTest, BeyondTheBoundTheFirstThatLeftIsForgotten) {
  KnownStores stores(absl::Hours(1));
  absl::Time now = absl::FromUnixSeconds(1000);
  mesh::Register worker;
  worker.set_session_store(true);
  for (size_t i = 0; i <= KnownStores::kAwayMax; ++i) {
    worker.set_name(absl::StrFormat("w%04d", KnownStores::kAwayMax - i));
    stores.Joined(worker);
    stores.Left(worker.name(), now += absl::Milliseconds(1));
  }
  EXPECT_EQ(stores.Missing(now)->worker, "w1024");
  EXPECT_THAT(stores.Forget(now), ::testing::ElementsAre("w1024"));
  EXPECT_EQ(stores.Missing(now)->worker, "w1023");
  EXPECT_EQ(stores.away(), static_cast<int64_t>(KnownStores::kAwayMax));
  EXPECT_EQ(stores.Forget(now + absl::Hours(1)).size(), KnownStores::kAwayMax);
  EXPECT_FALSE(stores.Missing(now).has_value());
}

TEST(RouterOptionsTest, AStoreIsNotForgottenBeforeItsWorkerCanComeBack) {
  RouterOptions options;
  options.store_forget = kRedialMax - absl::Milliseconds(1);
  EXPECT_THAT(MessageOf(options.Validate()), ::testing::HasSubstr("store_forget"));
  options.store_forget = kRedialMax;
  EXPECT_TRUE(options.Validate().ok());
}

// Workers come back to a router that began anew one after the other.
TEST_F(SessionCallsTest, AYoungRouterWaitsForItsStoresBeforeItSaysNotFound) {
  core->Tick(now);
  Join(kPrefill, "p1", mesh::ROLE_PREFILL);
  EXPECT_EQ(Call(Kind::kOpen, "s"), "");
  Pass(absl::Seconds(1), {kPrefill});
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Pass(SessionCalls::kYoung, {kPrefill, kDecode});
  EXPECT_EQ(Drain(), "2 <- Read 2\n");
  EXPECT_EQ(ReplyRecord(kDecode, 2, Record("s", 30, 0)),
            "session c: 30 tokens, ended, position 0 at \"\" \n");
  EXPECT_EQ(Call(Kind::kGet, "t"), "2 <- Read 3\n");
  EXPECT_THAT(Reply(kDecode, 3, absl::NotFoundError("none")),
              ::testing::HasSubstr("session c: NOT_FOUND"));
}

// The worker with the newest record is away: what another one has of the session from before is not it.
TEST_F(SessionCallsTest, AnOlderRecordThanTheOneSuspendedIsRefused) {
  using ::testing::HasSubstr;
  JoinWithStore(kDecode, "d1", mesh::ROLE_DECODE);
  Turn("s", 60, {60, 61, 62, 63, 64, 65});
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);
  Hold(kDecode2, 1);
  EXPECT_EQ(Call(Kind::kSuspend, "s"), "4 <- Suspend 2 tokens=66\n");
  Reply(kDecode2, 2);
  core->OnLinkClosed(kDecode2, absl::UnavailableError("reset"), now);
  Drain();
  const mesh::SessionRecord older = Record("s", 30, 0);
  EXPECT_EQ(Call(Kind::kOpen, "s"), "2 <- Read 3\n");
  EXPECT_EQ(ReplyRecord(kDecode, 3, older),
            "session c: UNAVAILABLE: worker \"d2\" may have the newest record of session \"s\" in "
            "its store and is not connected, and what others have is older; call again when it is, "
            "or begin the session anew; in 1h it counts as gone (--store-forget-minutes)\n");
  JoinWithStore(kDecode2, "d2", mesh::ROLE_DECODE);  // with an empty store
  Call(Kind::kOpen, "s");
  Reply(kDecode2, 4, absl::NotFoundError("none"));
  EXPECT_THAT(ReplyRecord(kDecode, 4, older), HasSubstr("session c: DATA_LOSS: session: no store"));
  // Begun anew it is later than both, wherever they are.
  core->OnLinkClosed(kDecode2, absl::UnavailableError("reset"), now);
  Turn("s", 20, {1});
  EXPECT_EQ(core->gauges().sessions_unsettled, 1);  // a record is written
  Reply(kDecode, 6);
  EXPECT_EQ(core->gauges().sessions_unsettled, 0);
  core->CallSession({.id = "c", .kind = Kind::kSuspend, .session = Id("s"), .name = "s"}, now);
  EXPECT_GT(Sent().suspended_unix_ns(), static_cast<uint64_t>(absl::ToUnixNanos(now)));
}

TEST(RecordStampsTest, TheLeastRecentlyNotedGoFirst) {
  RecordStamps stamps;
  stamps.Note("a", 7);
  stamps.Note("b", 7);
  stamps.Note("a", 5);
  for (size_t i = 2; i <= RecordStamps::kMax; ++i) stamps.Note("s" + std::to_string(i), 1);
  EXPECT_EQ(stamps.Of("a"), 7u);
  EXPECT_EQ(stamps.Of("b"), 0u);
}

}  // namespace
}  // namespace deltamesh
