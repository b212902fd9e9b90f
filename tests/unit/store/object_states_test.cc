// The bucket tier against a real server that checks signatures.
#include "runtime/store/object_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/store/disk_store.h"
#include "runtime/store/s3_client.h"
#include "tests/unit/store/s3_fixture.h"

namespace deltamesh {
namespace {

using testing::S3Server;
using testing::SteppedClock;
using testing::TestFolder;
using testing::TestPath;
using testing::TestState;
using testing::TestTarget;
using testing::TinyIdentity;

const std::string kX = "x", kY = "y";

class ObjectStatesTest : public ::testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() {
    InitLog("test", LogLevel::kError);
    for (const std::string& program : testing::S3Programs()) {
      servers_[program] = std::make_unique<S3Server>(program);
    }
  }
  static void TearDownTestSuite() { servers_.clear(); }

  S3Server& server() const { return *servers_[GetParam()]; }
  S3Options Options() const {
    return server().Options(::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  std::unique_ptr<S3Client> Client(const S3Options& options) {
    auto client = S3Client::Create(options, &clock_);
    CHECK_OK(client.status());
    return *std::move(client);
  }
  // Another worker with the same bucket, each time.
  std::unique_ptr<ObjectStates> Store(int64_t bytes_max = int64_t{1} << 20) {
    ObjectStatesOptions options;
    options.bytes_max = bytes_max;
    options.identity = TinyIdentity();
    options.records_max = 3;
    return std::make_unique<ObjectStates>(options, Client(Options()), &clock_);
  }
  static absl::Status Read(ObjectStates& store, const std::vector<PrefixKey>& path,
                           int64_t have = 0) {
    TestTarget target(path, have);
    const auto read = store.Read(target.target(), nullptr);
    EXPECT_TRUE(!read.ok() || target.Right());
    return read.status();
  }
  static std::vector<PrefixKey> First(const std::vector<PrefixKey>& path, int64_t blocks) {
    return {path.begin(), path.begin() + blocks};
  }
  static PiecesReader Bytes(std::string&& bytes) = delete;
  static PiecesReader Bytes(const std::string& bytes) {
    return PiecesReader({std::as_bytes(std::span(bytes))});
  }

  static std::map<std::string, std::unique_ptr<S3Server>> servers_;
  SteppedClock clock_;
};
std::map<std::string, std::unique_ptr<S3Server>> ObjectStatesTest::servers_;

INSTANTIATE_TEST_SUITE_P(Servers, ObjectStatesTest, ::testing::ValuesIn(testing::S3Programs()),
                         [](const auto& param) { return testing::S3ProgramName(param.param); });

TEST_P(ObjectStatesTest, ObjectsComeBackAsTheyWerePut) {
  auto client = Client(Options());
  std::string content(3'000'000, 0);
  SeededEntropy random(1);
  for (char& c : content) c = static_cast<char>(random.Next());
  PiecesReader body = Bytes(content);
  ASSERT_TRUE(client->Put("a/b-c_d.e", body, nullptr).ok());
  auto reader = client->Open("a/b-c_d.e", body.size(), nullptr);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->size(), body.size());
  std::vector<std::byte> one(10), two(1'999'990);
  const std::span<std::byte> pieces[] = {one, {}, two};
  ASSERT_TRUE((*reader)->Read(1'000'000, pieces).ok());
  EXPECT_EQ(std::memcmp(one.data(), content.data() + 1'000'000, 10), 0);
  EXPECT_EQ(std::memcmp(two.data(), content.data() + 1'000'010, two.size()), 0);
  EXPECT_FALSE((*reader)->Read(1'000'001, pieces).ok());
  EXPECT_EQ((*client->Open("a/b", 10, nullptr))->ReadOne(0, one).code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(client->Remove("a/b-c_d.e").ok());
  EXPECT_TRUE(client->Remove("a/b-c_d.e").ok());
  EXPECT_EQ(client->List("", 10, nullptr)->size(), 0u);
}

TEST_P(ObjectStatesTest, ListingsHaveManyPages) {
  S3Options options = Options();
  options.page_objects = 10;
  auto client = Client(options);
  for (int i = 0; i < 35; ++i) {
    PiecesReader body = Bytes(kX);
    ASSERT_TRUE(client->Put(absl::StrFormat("many/%04d", i), body, nullptr).ok());
  }
  const auto all = client->List("many/", 5000, nullptr);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 35u);
  EXPECT_EQ((*all)[34].name, "many/0034");
  EXPECT_EQ((*all)[34].bytes, 1);
  EXPECT_LT(absl::AbsDuration((*all)[0].modified - absl::Now()), absl::Hours(1));
  EXPECT_EQ(client->List("many/", 34, nullptr).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_P(ObjectStatesTest, AWrongSecretIsRefused) {
  S3Options options = Options();
  options.secret_key += "x";
  auto client = Client(options);
  PiecesReader body = Bytes(kX);
  const absl::Status put = client->Put("a", body, nullptr);
  EXPECT_EQ(put.code(), absl::StatusCode::kFailedPrecondition) << put;
  EXPECT_NE(put.message().find("SignatureDoesNotMatch"), std::string::npos) << put;
  EXPECT_NE(put.message().find("AWS_SECRET_ACCESS_KEY"), std::string::npos) << put;
  EXPECT_FALSE(client->List("", 10, nullptr).ok());
  EXPECT_FALSE(client->Remove("a").ok());
  options = Options();
  options.bucket = "nobucket";
  EXPECT_FALSE(Client(options)->Put("a", body, nullptr).ok());
  EXPECT_EQ(Client(Options())->List("", 10, nullptr)->size(), 0u);
}

TEST_P(ObjectStatesTest, AnotherWorkerReadsWhatOnePut) {
  const auto path = TestPath(1, 9, 4), branch = TestPath(2, 7, 4);
  auto one = Store();
  ASSERT_TRUE(one->List().ok());
  EXPECT_EQ(one->Find(path).snapshot.value(), 0);
  ASSERT_TRUE(one->Put(TestState(First(path, 4)).source(), nullptr).ok());
  EXPECT_EQ(one->Put(TestState(path).source(), nullptr)->blocks, 5);
  EXPECT_EQ(one->Put(TestState(branch).source(), nullptr)->blocks, 3);
  EXPECT_FALSE(one->Put(TestState(path).source(), nullptr)->written);

  auto other = Store();
  EXPECT_EQ(Read(*other, path).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(other->List().ok());
  EXPECT_EQ(other->Find(path).snapshot.value(), 9);
  EXPECT_EQ(other->Find(path).files, 2);
  for (const int64_t have : {0, 3, 4, 6, 9}) EXPECT_TRUE(Read(*other, path, have).ok()) << have;
  EXPECT_TRUE(Read(*other, branch).ok());

  auto third = Store();  // knows a key, not the listing
  EXPECT_FALSE(third->Has(path.back()));
  EXPECT_TRUE(third->Look(path.back()).ok());
  EXPECT_TRUE(Read(*third, path).ok());
  EXPECT_EQ(third->Look(TestPath(9, 2).back()).code(), absl::StatusCode::kNotFound);
}

// The files of a folder become objects as they are, parents first.
TEST_P(ObjectStatesTest, FilesGoUpAsTheyAre) {
  TestFolder folder;
  DiskStoreOptions disk_options;
  disk_options.folder = folder.path;
  disk_options.bytes_max = 1 << 20;
  disk_options.identity = TinyIdentity();
  auto disk = DiskStore::Open(disk_options, &clock_);
  const auto path = TestPath(3, 6);
  for (const int64_t blocks : {2, 4, 6}) {
    ASSERT_TRUE((*disk)->Put(TestState(First(path, blocks)).source()).ok());
  }
  auto store = Store();
  const auto files = (*disk)->FilesOf(path.back());
  ASSERT_EQ(files.size(), 3u);
  auto last = (*disk)->OpenState(files[2].state);
  EXPECT_EQ(store->PutFile(files[2].state, **last, nullptr).code(),
            absl::StatusCode::kFailedPrecondition);
  for (const auto& file : files) {
    auto bytes = (*disk)->OpenState(file.state);
    ASSERT_TRUE(store->PutFile(file.state, **bytes, nullptr).ok());
  }
  auto other = Store();
  ASSERT_TRUE(other->List().ok());
  EXPECT_TRUE(Read(*other, path).ok());
  EXPECT_TRUE(Read(*other, First(path, 4)).ok());
}

TEST_P(ObjectStatesTest, DamagedAndForeignObjectsAreRefused) {
  const auto path = TestPath(4, 2);
  auto store = Store();
  ASSERT_TRUE(store->Put(TestState(path).source(), nullptr).ok());
  auto client = Client(Options());
  const auto objects = client->List("states/", 10, nullptr);
  ASSERT_EQ(objects->size(), 1u);
  const std::string name = objects->front().name;
  std::string good(static_cast<size_t>(objects->front().bytes), 0);
  ASSERT_TRUE((*client->Open(name, static_cast<int64_t>(good.size()), nullptr))
                  ->ReadOne(0, std::as_writable_bytes(std::span(good)))
                  .ok());
  const std::pair<size_t, StoreRefusal> flips[] = {{3, StoreRefusal::kBadMagic},
                                                   {9, StoreRefusal::kBadVersion},
                                                   {100, StoreRefusal::kBadHeader},
                                                   {good.size() - 1, StoreRefusal::kBadContent}};
  for (const auto& [at, reason] : flips) {
    std::string bad = good;
    bad[at] ^= 1;
    PiecesReader body = Bytes(bad);
    ASSERT_TRUE(client->Put(name, body, nullptr).ok());
    auto other = Store();
    ASSERT_TRUE(other->List().ok());
    EXPECT_EQ(*RefusalOf(Read(*other, path)), reason) << at;
    EXPECT_EQ(other->Find(path).snapshot.value(), 0);
    EXPECT_EQ(other->stats().refused[static_cast<size_t>(reason)], 1u);
    // Another format's is left, and not tried again after the next listing.
    const bool left = reason == StoreRefusal::kBadVersion;
    EXPECT_EQ(client->List("states/", 10, nullptr)->size(), left ? 1u : 0u);
    ASSERT_TRUE(other->List().ok());
    EXPECT_EQ(other->Find(path).snapshot.value(), 0);
  }
  const std::string cut = good.substr(0, good.size() - 5);
  PiecesReader body = Bytes(cut);
  ASSERT_TRUE(client->Put(name, body, nullptr).ok());
  auto other = Store();
  ASSERT_TRUE(other->List().ok());
  EXPECT_EQ(*RefusalOf(Read(*other, path)), StoreRefusal::kTruncated);
  // It vanished after it was listed.
  ASSERT_TRUE(store->Put(TestState(TestPath(5, 2)).source(), nullptr).ok());
  ASSERT_TRUE(other->List().ok());
  ASSERT_TRUE(client->Remove(client->List("states/", 10, nullptr)->front().name).ok());
  EXPECT_EQ(Read(*other, TestPath(5, 2)).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(other->stats().missed, 1u);
}

TEST_P(ObjectStatesTest, TheBoundHolds) {
  const int64_t bound = 9000;
  auto store = Store(bound);
  SeededEntropy random(3);
  auto client = Client(Options());
  for (int step = 0; step < 60; ++step) {
    std::vector<PrefixKey> path = TestPath(random.Next() % 5, 6, 2);
    path.resize(1 + random.Next() % 6);
    ASSERT_TRUE(store->Put(TestState(path).source(), nullptr).ok());
    ASSERT_TRUE(Read(*store, path).ok());
    ASSERT_LE(store->stats().bytes, bound);
    clock_.now += absl::Seconds(30);
  }
  int64_t bytes = 0;
  const auto objects = client->List("", 100, nullptr);
  for (const ObjectInfo& object : *objects) bytes += object.bytes;
  EXPECT_EQ(bytes, store->stats().bytes);
  EXPECT_GT(store->stats().evicted, 10u);
  auto other = Store(bound);
  ASSERT_TRUE(other->List().ok());
  EXPECT_EQ(other->stats().bytes, bytes);
  EXPECT_EQ(store->Put(TestState(TestPath(1, 60)).source(), nullptr).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_P(ObjectStatesTest, RecordsAreEveryWorkers) {
  auto one = Store(), other = Store();
  EXPECT_EQ(one->GetRecord("s/1").status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(one->PutRecord("s/1", "first").ok());
  ASSERT_TRUE(one->PutRecord("s/1", "second").ok());
  EXPECT_EQ(*other->GetRecord("s/1"), "second");
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(one->PutRecord(std::to_string(i), "x").ok());
  EXPECT_EQ(one->stats().records, 3);
  EXPECT_EQ(one->stats().records_refused, 0u);
  const absl::Status full = one->PutRecord("2", "x");
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(MessageOf(full), ::testing::HasSubstr("the bucket holds 3 other records"));
  EXPECT_THAT(MessageOf(full), ::testing::HasSubstr("--store-s3-records"));
  EXPECT_EQ(one->stats().records_refused, 1u);
  EXPECT_EQ(one->stats().records, 3);
  EXPECT_EQ(one->GetRecord("2").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(one->PutRecord("1", "y").ok());  // what is there can follow its session
  EXPECT_EQ(*other->GetRecord("s/1"), "second");
  // A damaged one is refused, and stays until it is replaced.
  auto client = Client(Options());
  PiecesReader bad = Bytes(kX);
  ASSERT_TRUE(client->Put("records/1", bad, nullptr).ok());
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(*RefusalOf(other->GetRecord("1").status()), StoreRefusal::kTruncated);
  }
  EXPECT_EQ(client->List("records/", 10, nullptr)->size(), 3u);
  EXPECT_TRUE(one->PutRecord("1", "again").ok());
  EXPECT_EQ(*other->GetRecord("1"), "again");
}

// Shares are counted per group, whatever is put anew, listed or replaced.
TEST_P(ObjectStatesTest, ATenantHasAShareOfTheRecords) {
  ObjectStatesOptions options;
  options.bytes_max = 1 << 20;
  options.records_max = 6;
  options.record_group_share = 0.5;
  ObjectStates store(options, Client(Options()), &clock_);
  for (int again = 0; again < 3; ++again) {
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(
          store.PutRecord(absl::StrFormat("session-aa-%d", i), std::string(1 << i, 'x')).ok());
    }
    const absl::Status over = store.PutRecord("session-aa-3", "x");
    EXPECT_EQ(over.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(MessageOf(over), ::testing::HasSubstr("its tenant has 3 other records of"));
    EXPECT_THAT(MessageOf(over), ::testing::HasSubstr("objects records/session-aa-* of"));
    EXPECT_TRUE(store.PutRecord("session-bb-0", "x").ok());
    ASSERT_TRUE(store.List().ok());
    EXPECT_EQ(store.stats().records, 4);
  }
  EXPECT_EQ(store.stats().records_refused, 3u);
}

// What a put expects to replace is said to the server.
TEST_P(ObjectStatesTest, PutsReplaceOnlyWhatTheyExpect) {
  auto client = Client(Options());
  PiecesReader one = Bytes(kX);
  EXPECT_TRUE(client->PutIf("records/one", one, "", nullptr).ok());
  std::string version;
  const auto content = client->Get("records/one", 1000, nullptr, &version);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_FALSE(version.empty());
  EXPECT_EQ(client->PutIf("records/one", one, "", nullptr).code(), absl::StatusCode::kAborted);
  PiecesReader two = Bytes(kY);
  EXPECT_TRUE(client->PutIf("records/one", two, version, nullptr).ok());
  EXPECT_EQ(client->PutIf("records/one", one, version, nullptr).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(*client->Get("records/one", 1000, nullptr), kY);
  EXPECT_EQ(client->Get("records/two", 1000, nullptr, &version).status().code(),
            absl::StatusCode::kNotFound);
}

// Nobody waits long for a server that is down, and it is asked again later.
TEST_P(ObjectStatesTest, AServerThatIsDownIsLeftAlone) {
  S3Options options = Options();
  options.call_max = absl::Milliseconds(300);
  options.tries = 2;
  options.retry_after = absl::Milliseconds(20);
  auto client = Client(options);
  PiecesReader body = Bytes(kX);
  ASSERT_TRUE(client->Put("a", body, nullptr).ok());
  server().Freeze();
  const absl::Time begin = absl::Now();
  EXPECT_EQ(client->Put("a", body, nullptr).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->failed_tries(), 2u);
  const absl::Time asked = absl::Now();
  EXPECT_LT(asked - begin, absl::Seconds(3));
  const absl::Status left = client->Put("a", body, nullptr);
  EXPECT_EQ(left.code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - asked, absl::Milliseconds(100));
  EXPECT_EQ(client->failed_tries(), 2u);
  clock_.now += absl::Seconds(2);
  const absl::Time cancel = absl::Now() + absl::Milliseconds(50);
  options.call_max = absl::Seconds(20);
  EXPECT_EQ(Client(options)->Put("a", body, [&] { return absl::Now() > cancel; }).code(),
            absl::StatusCode::kCancelled);
  EXPECT_LT(absl::Now() - cancel, absl::Seconds(3));
  server().Thaw();
  for (int i = 0; i < 5 && !client->Put("a", body, nullptr).ok(); ++i)
    clock_.now += absl::Minutes(2);
  EXPECT_TRUE(client->Put("a", body, nullptr).ok());
}

TEST(S3OptionsTest, TheAddressAndTheEnvironmentAreChecked) {
  std::map<std::string, std::string> environment = {{"AWS_ACCESS_KEY_ID", "key"},
                                                    {"AWS_SECRET_ACCESS_KEY", "secret"},
                                                    {"AWS_REGION", "mars-1"},
                                                    {"AWS_SESSION_TOKEN", "token"}};
  const auto parse = [&](const char* url) {
    return ParseS3(url, [&](const char* name) { return environment[name]; });
  };
  const auto options = parse("https://host:9000/bucket/some/prefix");
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->server, "https://host:9000");
  EXPECT_EQ(options->bucket, "bucket");
  EXPECT_EQ(options->prefix, "some/prefix/");
  EXPECT_EQ(options->region, "mars-1");
  EXPECT_EQ(options->session_token, "token");
  EXPECT_EQ(parse("http://h/b")->prefix, "");
  EXPECT_EQ(parse("http://h/b/")->prefix, "");
  for (const char* bad : {"", "s3://b", "host/b", "http://h", "http://h/", "http:///b",
                          "http://u:p@h/b", "http://h/b/a b", "http://h/b?x=y", "http://h/b//",
                          "http://h/b/a//c", "http://h/b/../c", "http://h/b/a/./", "http://h/.."}) {
    EXPECT_EQ(parse(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  for (const char* told : {"http://user:hidden@h/b", "ftp://user:hidden@h/b", "user:hidden@h/b"}) {
    EXPECT_EQ(parse(told).status().ToString().find("hidden"), std::string::npos) << told;
  }
  environment["AWS_SECRET_ACCESS_KEY"] = "";
  EXPECT_EQ(parse("http://h/b").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ObjectNameTest, NamesTellHowStatesHangTogether) {
  const auto path = TestPath(1, 4);
  StoredState state;
  state.key = path[3];
  state.parent = path[1];
  state.blocks = 4;
  state.from = 2;
  state.kind = SnapshotKind::kJunction;
  StoredState parsed;
  ASSERT_TRUE(ParseObjectName(ObjectNameOf(state), &parsed));
  EXPECT_EQ(parsed.key, state.key);
  EXPECT_EQ(parsed.parent, state.parent);
  EXPECT_EQ(parsed.blocks, 4);
  EXPECT_EQ(parsed.from, 2);
  EXPECT_EQ(parsed.kind, SnapshotKind::kJunction);
  state.from = 0;
  ASSERT_TRUE(ParseObjectName(ObjectNameOf(state), &parsed));
  const std::string good = ObjectNameOf(state);
  for (const std::string& bad : {std::string("states/"), good + "-1", good.substr(1), good + "9",
                                 "states/x" + good.substr(8), good.substr(0, good.size() - 2)}) {
    EXPECT_FALSE(ParseObjectName(bad, &parsed)) << bad;
  }
}

}  // namespace
}  // namespace deltamesh
