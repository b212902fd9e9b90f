// Snapshots in a bucket: another worker, with another disk or none, goes on where one left.
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/unit/store/s3_fixture.h"
#include "tests/unit/store/tier_fixture.h"

namespace deltamesh {
namespace {

using testing::RandomPrompt;
using testing::Result;
using testing::S3Server;
using testing::SteppedClock;
using testing::TestFolder;
using testing::TieredEngine;

class StateTierS3Test : public ::testing::TestWithParam<std::tuple<const char*, std::string>> {
 protected:
  static void SetUpTestSuite() {
    InitLog("test", LogLevel::kError);
    for (const std::string& program : testing::S3Programs()) {
      servers_[program] = std::make_unique<S3Server>(program);
    }
  }
  static void TearDownTestSuite() { servers_.clear(); }
  static const char* Family() { return std::get<0>(GetParam()); }
  std::unique_ptr<ObjectStore> Bucket() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    S3Options options = servers_[std::get<1>(GetParam())]->Options(
        absl::StrFormat("%s/%s", test->test_suite_name(), test->name()));
    options.call_max = absl::Seconds(5);
    options.retry_after = absl::Milliseconds(10);
    return *S3Client::Create(options, &clock_);
  }
  std::string Folder(const char* name) const { return folder_.path + "/" + name; }

  static std::map<std::string, std::unique_ptr<S3Server>> servers_;
  SteppedClock clock_;
  TestFolder folder_;
};
std::map<std::string, std::unique_ptr<S3Server>> StateTierS3Test::servers_;

INSTANTIATE_TEST_SUITE_P(Families, StateTierS3Test,
                         ::testing::Combine(::testing::Values("kimi_k3_tiny", "kimi_linear_tiny"),
                                            ::testing::ValuesIn(testing::S3Programs())),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param)) + "_" +
                                  testing::S3ProgramName(std::get<1>(param.param));
                         });

TEST_P(StateTierS3Test, EveryTailLengthFromABucketEqualsAColdRun) {
  const std::vector<TokenId> shared = RandomPrompt(1, 200, testing::kVocab);
  {
    TieredEngine t(Family(), Folder("one"), Bucket());
    t.Run(shared);
    t.Settle(absl::Seconds(31));
    EXPECT_EQ(t.Metric("store_states", "object_store"), 0);
    t.Settle(absl::Minutes(11));
    t.Settle(absl::Seconds(2));
    EXPECT_EQ(t.Metric("store_states", "object_store"), 1);
  }
  TieredEngine t(Family(), "", Bucket());  // another machine
  for (int64_t tail = 1; tail <= 64; ++tail) {
    t.cache->Clear();
    std::vector<TokenId> prompt(shared.begin(), shared.begin() + 192);
    const auto more = RandomPrompt(100 + static_cast<uint64_t>(tail), tail, testing::kVocab);
    prompt.insert(prompt.end(), more.begin(), more.end());
    const Result warm = t.Run(prompt, 3);
    EXPECT_EQ(t.restored, 192) << tail;
    EXPECT_EQ(warm, t.Cold(prompt, 3)) << tail;
  }
  t.cache->Clear();
  t.engine.ExpectBaseline();
}

TEST_P(StateTierS3Test, EveryTailLengthFromABucketInCompanyEqualsAColdRunAlone) {
  const std::vector<TokenId> shared = RandomPrompt(1, 200, testing::kVocab);
  TieredEngine one(Family(), "", Bucket());
  one.Run(shared);
  one.Settle(absl::Seconds(31));
  one.Settle(absl::Minutes(11));
  one.Settle(absl::Seconds(2));
  EXPECT_EQ(one.Metric("store_states", "object_store"), 1);
  TieredEngine t(Family(), "", Bucket());  // another machine, without a disk
  t.ExpectEveryTailInCompany({shared.begin(), shared.begin() + 192});
}

// Suspended on one worker, resumed at once on another that has not listed the bucket since.
TEST_P(StateTierS3Test, ASessionMovesThroughTheBucket) {
  const auto prompt = RandomPrompt(4, 330, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  TieredEngine other(Family(), Folder("other"), Bucket());
  {
    TieredEngine one(Family(), Folder("one"), Bucket());
    one.Run({prompt.begin(), prompt.begin() + 200});
    one.Settle(absl::Seconds(31));
    one.Run(prompt);
    one.tier->Suspend(1, path);
    const SessionStoreDone done = one.Done();
    EXPECT_TRUE(done.status.ok()) << done.status;
    EXPECT_EQ(done.blocks, 5);
    EXPECT_EQ(done.tier, "object store");
    EXPECT_EQ(one.Metric("store_states", "object_store"), 2);  // and its parent
    one.tier->PutRecord(2, "session", "content");
    EXPECT_EQ(one.Done().tier, "object store");
  }
  other.tier->GetRecord(3, "session");
  EXPECT_EQ(other.Done().content, "content");
  other.tier->Load(4, path);
  const SessionStoreDone done = other.Done();
  EXPECT_TRUE(done.status.ok()) << done.status;
  EXPECT_EQ(done.blocks, 5);
  EXPECT_EQ(done.tier, "object store");
  EXPECT_EQ(other.Run(prompt), other.Cold(prompt));
  EXPECT_EQ(other.restored, 320);
}

// Without a disk, and without a server: answers stay right, failures are counted.
TEST_P(StateTierS3Test, AServerThatIsDownCostsNoAnswer) {
  const auto prompt = RandomPrompt(5, 200, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  S3Options options;
  options.server = "http://127.0.0.1:1";  // nobody listens
  options.bucket = "b";
  options.access_key = options.secret_key = "x";
  options.retry_after = absl::Milliseconds(1);
  TieredEngine t(Family(), "", *S3Client::Create(options, &clock_));
  EXPECT_EQ(t.Run(prompt), t.Cold(prompt));
  t.Settle(absl::Seconds(31));
  EXPECT_GE(t.Metric("store_failures_total", "write"), 1);
  t.tier->Suspend(1, path);
  SessionStoreDone done = t.Done();
  EXPECT_EQ(done.status.code(), absl::StatusCode::kUnavailable) << done.status;
  EXPECT_EQ(t.cache->Find(path).snapshot.value(), 3);  // it stays where it is
  t.tier->GetRecord(2, "session");
  EXPECT_EQ(t.Done().status.code(), absl::StatusCode::kUnavailable);

  TieredEngine disk(Family(), Folder("disk"), *S3Client::Create(options, &clock_));
  disk.Run(prompt);
  disk.tier->Suspend(3, path);
  done = disk.Done();
  EXPECT_TRUE(done.status.ok()) << done.status;
  EXPECT_EQ(done.tier, "disk");
  disk.tier->PutRecord(4, "session", "content");
  EXPECT_EQ(disk.Done().tier, "disk");
  disk.tier->GetRecord(5, "session");
  EXPECT_EQ(disk.Done().content, "content");
  EXPECT_EQ(disk.Metric("store_unwritten_total", "upload"), 1);
}

}  // namespace
}  // namespace deltamesh
