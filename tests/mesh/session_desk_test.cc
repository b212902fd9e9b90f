// Session commands at a worker, with a store that answers when the test says so.
#include "services/worker/session_desk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/store/record_file.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

// Writes down what it is asked.
class ScriptedStore final : public SessionStore {
 public:
  void Suspend(uint64_t ticket, std::span<const PrefixKey> path) override {
    asked.push_back({ticket, absl::StrFormat("suspend %d", path.size())});
  }
  void Load(uint64_t ticket, std::span<const PrefixKey> path) override {
    asked.push_back({ticket, absl::StrFormat("load %d", path.size())});
  }
  void PutRecord(uint64_t ticket, const std::string& name, std::string content) override {
    asked.push_back({ticket, "put"});
    records[name] = std::move(content);
  }
  void GetRecord(uint64_t ticket, const std::string&) override { asked.push_back({ticket, "get"}); }
  void Abandon(uint64_t ticket) override { abandoned.push_back(ticket); }
  std::vector<SessionStoreDone> TakeDone() override { return std::exchange(done, {}); }

  std::vector<std::pair<uint64_t, std::string>> asked;
  std::map<std::string, std::string> records;
  std::vector<SessionStoreDone> done;
  std::vector<uint64_t> abandoned;
};

class SessionDeskTest : public ::testing::Test {
 protected:
  SessionDeskTest() {
    InitLog("test", LogLevel::kError);
    links.Open(1);
    links.Take();
  }

  static mesh::SessionCommand Command(uint64_t call) {
    mesh::SessionCommand command;
    command.set_call(call);
    command.set_session(std::string(32, 's'));
    return command;
  }
  static mesh::SessionCommand SuspendCommand(uint64_t call, int tokens) {
    mesh::SessionCommand command = Command(call);
    for (int i = 0; i < tokens; ++i) command.mutable_suspend()->mutable_record()->add_tokens(i);
    return command;
  }
  std::string Asked() {
    std::string out;
    for (const auto& [ticket, what] : std::exchange(store.asked, {})) {
      out += absl::StrFormat("%d %s;", ticket, what);
    }
    return out;
  }
  std::vector<mesh::SessionReply> Replies() {
    std::vector<mesh::SessionReply> out;
    for (SendToRouter& sent : links.Take()) {
      if (sent.message.has_session()) out.push_back(sent.message.session());
    }
    return out;
  }
  std::vector<mesh::SessionReply> Done(SessionStoreDone done) {
    store.done.push_back(std::move(done));
    desk.Step(now);
    return Replies();
  }

  static mesh::Register Registration() {
    mesh::Register r;
    r.set_name("d1");
    r.mutable_model()->set_digest("m");
    return r;
  }

  absl::Time now = absl::FromUnixSeconds(1000);
  WorkerLinks links{Registration()};
  ScriptedStore store;
  SessionDesk desk{&store, &links};
};

TEST_F(SessionDeskTest, ARecordThatNamesItsStateIsWrittenAlone) {
  mesh::SessionCommand command = SuspendCommand(7, 200);
  mesh::SessionRecord* sent = command.mutable_suspend()->mutable_record();
  sent->set_position(64);
  for (const bool known : {true, false}) {
    sent->set_key(std::string(16, known ? 'k' : '\0'));
    desk.OnCommand(1, command, now);
    EXPECT_EQ(Asked(), known ? "1 put;" : "2 put;");
    mesh::SessionRecord record;
    ASSERT_TRUE(record.ParseFromString(store.records.begin()->second));
    EXPECT_EQ(record.position(), 64u);
    EXPECT_EQ(record.key(), known ? sent->key() : "");
    SessionStoreDone done;
    done.ticket = known ? 1 : 2;
    done.bytes = 40;
    done.tier = "disk";
    const auto replies = Done(done);
    ASSERT_EQ(replies.size(), 1u);
    EXPECT_EQ(replies[0].code(), 0);
    EXPECT_EQ(replies[0].position(), 64u);
    EXPECT_EQ(replies[0].tier(), "disk");
  }
}

TEST_F(SessionDeskTest, SuspendingWritesTheStateThenTheRecord) {
  desk.OnCommand(1, SuspendCommand(7, 200), now);
  EXPECT_EQ(Asked(), "1 suspend 3;");
  EXPECT_TRUE(
      Done({.ticket = 1, .status = {}, .blocks = 2, .bytes = 500, .tier = "disk", .content = ""})
          .empty());
  EXPECT_EQ(Asked(), "1 put;");
  mesh::SessionRecord record;
  const std::string name = SessionRecordName(std::string(32, 's'));
  // A tenant's records are a group of the store.
  EXPECT_EQ(RecordGroupOf(name), "session-7373737373737373-");
  EXPECT_EQ(name.size(), 73u);
  ASSERT_TRUE(record.ParseFromString(store.records.at(name)));
  EXPECT_EQ(record.position(), 128u);
  EXPECT_EQ(record.key().size(), 16u);
  EXPECT_EQ(record.tokens_size(), 200);
  const auto replies =
      Done({.ticket = 1, .status = {}, .blocks = 0, .bytes = 40, .tier = "disk", .content = ""});
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].call(), 7u);
  EXPECT_EQ(replies[0].code(), 0);
  EXPECT_EQ(replies[0].position(), 128u);
  EXPECT_EQ(replies[0].bytes(), 540u);
  EXPECT_EQ(replies[0].tier(), "disk");
  EXPECT_TRUE(desk.idle());
}

TEST_F(SessionDeskTest, WithoutAStateTheRecordIsWrittenAlone) {
  desk.OnCommand(1, SuspendCommand(7, 20), now);
  EXPECT_EQ(Asked(), "1 suspend 0;");
  Done({.ticket = 1, .status = {}, .blocks = 0, .bytes = 0, .tier = "", .content = ""});
  const auto replies =
      Done({.ticket = 1, .status = {}, .blocks = 0, .bytes = 40, .tier = "disk", .content = ""});
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].position(), 0u);
  EXPECT_EQ(replies[0].tier(), "disk");
  // A state that cannot be written writes no record.
  desk.OnCommand(1, SuspendCommand(8, 200), now);
  Asked();
  const auto failed = Done({.ticket = 2,
                            .status = absl::ResourceExhaustedError("full"),
                            .blocks = 0,
                            .bytes = 0,
                            .tier = "",
                            .content = ""});
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(failed[0].retry_after_ms(), 0u) << "it does not pass by itself";
  EXPECT_EQ(Asked(), "");
}

TEST_F(SessionDeskTest, ReadsGiveTheRecordOrWhyNot) {
  mesh::SessionRecord record;
  record.add_tokens(5);
  for (uint64_t call = 1; call <= 3; ++call) {
    mesh::SessionCommand command = Command(call);
    command.mutable_read();
    desk.OnCommand(1, command, now);
  }
  auto replies = Done({.ticket = 1,
                       .status = {},
                       .blocks = 0,
                       .bytes = 0,
                       .tier = "",
                       .content = record.SerializeAsString()});
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].record().tokens(0), 5);
  replies = Done({.ticket = 2,
                  .status = absl::NotFoundError("none"),
                  .blocks = 0,
                  .bytes = 0,
                  .tier = "",
                  .content = ""});
  EXPECT_EQ(replies[0].code(), static_cast<int>(absl::StatusCode::kNotFound));
  replies =
      Done({.ticket = 3, .status = {}, .blocks = 0, .bytes = 0, .tier = "", .content = "\xff\xff"});
  EXPECT_EQ(replies[0].code(), static_cast<int>(absl::StatusCode::kDataLoss));
}

TEST_F(SessionDeskTest, LoadsSayWhereTheStateStandsNow) {
  mesh::SessionCommand command = Command(4);
  for (int i = 0; i < 130; ++i) command.mutable_load()->add_tokens(i);
  desk.OnCommand(1, command, now);
  EXPECT_EQ(Asked(), "1 load 2;");
  const auto replies =
      Done({.ticket = 1, .status = {}, .blocks = 2, .bytes = 9, .tier = "disk", .content = ""});
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].position(), 128u);
  EXPECT_EQ(replies[0].tier(), "disk");
}

TEST_F(SessionDeskTest, DeadlinesLostLinksAndBounds) {
  mesh::SessionCommand late = SuspendCommand(1, 20);
  late.set_deadline_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(now + absl::Seconds(1))));
  desk.OnCommand(1, late, now);
  now += absl::Seconds(2);
  desk.Step(now);
  auto replies = Replies();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_TRUE(desk.idle());
  // What the store says now is late.
  EXPECT_TRUE(Done({.ticket = 1, .status = {}, .blocks = 0, .bytes = 0, .tier = "", .content = ""})
                  .empty());
  desk.OnCommand(1, late, now);
  EXPECT_EQ(Replies()[0].code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  for (size_t i = 0; i <= SessionDesk::kCommandsMax; ++i) {
    desk.OnCommand(1, SuspendCommand(10 + i, 20), now);
  }
  replies = Replies();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(replies[0].retry_after_ms(), 1000u);
  desk.OnLinkClosed(1);
  EXPECT_TRUE(desk.idle());
  mesh::SessionCommand bad = Command(1);
  desk.OnCommand(1, bad, now);
  bad.set_session("short");
  desk.OnCommand(1, bad, now);
  EXPECT_EQ(Replies().size(), 2u);
  SessionDesk none(nullptr, &links);
  none.OnCommand(1, SuspendCommand(1, 2), now);
  EXPECT_THAT(Replies()[0].message(), HasSubstr("--store-dir"));
}

// What a slow store was asked for lies there after its deadline: it counts until the store is done with it.
TEST_F(SessionDeskTest, WhatNobodyWaitsForIsBoundedToo) {
  mesh::SessionCommand read = Command(1);
  read.mutable_read();
  read.set_deadline_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(now + absl::Seconds(1))));
  for (size_t i = 0; i < SessionDesk::kCommandsMax; ++i) desk.OnCommand(1, read, now);
  const auto asked = std::exchange(store.asked, {});
  ASSERT_EQ(asked.size(), SessionDesk::kCommandsMax);
  now += absl::Seconds(2);
  desk.Step(now);
  EXPECT_EQ(Replies().size(), SessionDesk::kCommandsMax);
  EXPECT_EQ(store.abandoned.size(), SessionDesk::kCommandsMax);
  desk.OnCommand(1, SuspendCommand(2, 20), now);
  auto replies = Replies();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_TRUE(store.asked.empty());
  EXPECT_TRUE(Done({.ticket = asked[3].first,
                    .status = absl::CancelledError("nobody waits"),
                    .blocks = 0,
                    .bytes = 0,
                    .tier = "",
                    .content = ""})
                  .empty());
  desk.OnCommand(1, SuspendCommand(3, 20), now);
  EXPECT_TRUE(Replies().empty());
  EXPECT_EQ(store.asked.size(), 1u);
}

}  // namespace
}  // namespace deltamesh
