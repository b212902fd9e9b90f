// What the bucket tier makes of answers that a good server gives rarely, or never.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/status.h"
#include "runtime/store/object_states.h"
#include "runtime/store/s3_client.h"
#include "tests/unit/store/answer_server.h"
#include "tests/unit/store/memory_objects.h"
#include "tests/unit/store/store_fixture.h"

namespace deltamesh {
namespace {

using testing::AnswerServer;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SteppedClock;
using testing::TestPath;
using testing::TestState;
using testing::TestTarget;
using testing::TinyIdentity;

const std::string kX = "x";
const std::string kETag = "ETag: \"9dd4e461268c8034f5c8564e155c67a6\"\r\n";
const std::string kObject = "Content-Type: application/octet-stream\r\n" + kETag;
const std::string kHtml = "Content-Type: text/html; charset=utf-8\r\n";
const std::string kPage = "<!DOCTYPE html><html><p>Please log in to this network<br></html>";

std::string Error(const std::string& code, const std::string& message = "") {
  return "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>" + code + "</Code><Message>" +
         message + "</Message></Error>";
}

class S3AnswersTest : public ::testing::Test {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  std::unique_ptr<S3Client> Client(const AnswerServer& server) {
    auto client = S3Client::Create(server.Options(), &clock_);
    CHECK_OK(client.status());
    return *std::move(client);
  }
  std::unique_ptr<ObjectStates> Store(std::unique_ptr<ObjectStore> objects) {
    ObjectStatesOptions options;
    options.bytes_max = 1 << 20;
    options.identity = TinyIdentity();
    return std::make_unique<ObjectStates>(options, std::move(objects), &clock_);
  }
  // What a call comes to when each of its requests is answered so.
  absl::Status Ask(const std::string& answer, const std::string& what) {
    const AnswerServer server([&](const std::string&) { return answer; });
    auto client = Client(server);
    PiecesReader bytes({std::as_bytes(std::span(kX))});
    if (what == "remove") return client->Remove("a");
    if (what == "put") return client->Put("a", bytes, nullptr);
    if (what == "replace") return client->PutIf("a", bytes, "\"version\"", nullptr);
    if (what == "get") return client->Get("a", 10, nullptr, nullptr, "x").status();
    if (what == "range") {
      std::byte to[10];
      return (*client->Open("a", 100, nullptr))->ReadOne(50, to);
    }
    auto store = Store(std::move(client));
    if (what == "look") return store->Look(TestPath(1, 1).back());
    if (what == "list") return store->List();
    if (what == "put record") return store->PutRecord("x", "content");
    CHECK(what == "get record");
    const absl::Status status = store->GetRecord("x").status();
    if (!absl::IsDataLoss(status)) {
      const StoreStats stats = store->stats();
      EXPECT_THAT(stats.refused, ::testing::Each(0u));
    }
    return status;
  }

  SteppedClock clock_;
};

// A bucket that is gone and a proxy's page are no absent conversations, and say what to check.
TEST_F(S3AnswersTest, OnlyAServerThatLacksTheObjectSaysNotFound) {
  for (const std::string& body : {Error("NoSuchBucket"), kPage}) {
    for (const char* what : {"get", "get record", "range", "look", "list", "remove", "replace"}) {
      const absl::Status status = Ask(AnswerServer::Answer("404 Not Found", body), what);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << what << ": " << status;
      EXPECT_THAT(MessageOf(status), HasSubstr("--store-s3")) << what;
      EXPECT_THAT(MessageOf(status), HasSubstr("/mistyped")) << what;
    }
  }
  const std::string key = AnswerServer::Answer("404 Not Found", Error("NoSuchKey"));
  const std::string none = AnswerServer::Answer("404 Not Found", "");
  EXPECT_EQ(Ask(key, "get record").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Ask(key, "get").code(), absl::StatusCode::kNotFound);  // longer than what it may get
  EXPECT_EQ(Ask(key, "range").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Ask(none, "get").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Ask(key, "look").code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Ask(key, "remove").ok());
  EXPECT_TRUE(Ask(none, "remove").ok());
  // Another worker removed what was to be replaced.
  EXPECT_EQ(Ask(key, "replace").code(), absl::StatusCode::kAborted);
}

TEST_F(S3AnswersTest, AServerThatIsLeftAloneStillSaysWhy) {
  const AnswerServer server(
      [](const std::string&) { return AnswerServer::Answer("404 Not Found", kPage); });
  S3Options options = server.Options();
  options.down_min = options.down_max = absl::Seconds(1);
  auto client = *S3Client::Create(options, &clock_);
  for (int again = 0; again < 2; ++again) {
    const absl::Status status = client->Get("a", 10, nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(MessageOf(status), HasSubstr("--store-s3"));
  }
  EXPECT_EQ(client->failed_tries(), 3u);
}

// As a real server (versitygw) and AWS put them: statuses alone say little.
TEST_F(S3AnswersTest, RefusalsSayWhatToDo) {
  struct Case {
    const char *status, *code;
    absl::StatusCode as;
    const char* says;
  };
  const auto keys = absl::StatusCode::kFailedPrecondition;
  for (const Case& c : std::initializer_list<Case>{
           {"403 Forbidden", "SignatureDoesNotMatch", keys, "AWS_SECRET_ACCESS_KEY"},
           {"400 Bad Request", "AuthorizationHeaderMalformed", keys, "AWS_REGION"},
           {"400 Bad Request", "ExpiredToken", keys, "AWS_SESSION_TOKEN"},
           {"400 Bad Request", "InvalidToken", keys, "AWS_SESSION_TOKEN"},
           {"403 Forbidden", "RequestTimeTooSkewed", keys, "set the clock"},
           {"301 Moved Permanently", "PermanentRedirect", absl::StatusCode::kUnavailable,
            "--store-s3's endpoint"},
           {"400 Bad Request", "RequestTimeout", absl::StatusCode::kUnavailable, "400"},
           {"409 Conflict", "ConditionalRequestConflict", absl::StatusCode::kAborted, "409"},
           {"412 Precondition Failed", "PreconditionFailed", absl::StatusCode::kAborted, "412"},
           {"409 Conflict", "ConcurrentModification", absl::StatusCode::kAborted, "409"},
           {"403 Forbidden", "QuotaExceeded", absl::StatusCode::kResourceExhausted, "quota"},
           // No other worker's put: nothing can be put at that name.
           {"409 Conflict", "ObjectParentIsFile", absl::StatusCode::kInternal, "409"}}) {
    const absl::Status status =
        Ask(AnswerServer::Answer(c.status, Error(c.code, "in its words")), "replace");
    EXPECT_EQ(status.code(), c.as) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr(std::string(c.code) + " (in its words)"));
    EXPECT_THAT(MessageOf(status), HasSubstr(c.says));
  }
}

// A page that comes with 200 is neither a damaged object nor an answer to what was asked.
TEST_F(S3AnswersTest, APageIsNoAnswer) {
  const std::string bare = AnswerServer::Answer("200 OK", kPage, "Server: proxy\r\n");
  const std::string html = AnswerServer::Answer("200 OK", kPage, kHtml + kETag);
  const std::string empty = AnswerServer::Answer("200 OK", "", kHtml);
  EXPECT_EQ(Ask(empty, "put").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Ask(empty, "get record").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Ask(empty, "remove").code(), absl::StatusCode::kUnavailable);
  for (const std::string& page : {bare, html}) {
    for (const char* what :
         {"get", "get record", "put record", "range", "list", "look", "remove", "put", "replace"}) {
      const absl::Status status = Ask(page, what);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << what << ": " << status;
      EXPECT_THAT(MessageOf(status), HasSubstr("a proxy or captive page answered in place"))
          << what;
      EXPECT_THAT(MessageOf(status), HasSubstr("look at --store-s3's endpoint")) << what;
    }
  }
  // What is really damaged is refused, and what is whole is read whatever its type.
  const std::string whole = EncodeRecord("x", "content");
  std::string bad = whole;
  bad[3] ^= 1;
  const auto record = [&](const std::string& body, const std::string& headers) {
    return RefusalOf(Ask(AnswerServer::Answer("200 OK", body, headers), "get record"));
  };
  EXPECT_EQ(record(bad, kObject), StoreRefusal::kBadMagic);
  EXPECT_EQ(record(bad, "Content-Type: binary/octet-stream\r\n" + kETag), StoreRefusal::kBadMagic);
  EXPECT_EQ(record(bad, "Content-Type: text/plain\r\nx-amz-request-id: P42H2\r\n"),
            StoreRefusal::kBadMagic);
  EXPECT_EQ(record(bad, "Content-Type: text/plain\r\n" + kETag), StoreRefusal::kBadMagic);
  for (const char* type : {"text/html", "Application/XML; charset=utf-8", "application/json"}) {
    EXPECT_EQ(record(bad, absl::StrFormat("Content-Type: %s\r\n%sx-amz-request-id: P42H2\r\n", type,
                                          kETag)),
              std::nullopt)
        << type;
  }
  EXPECT_EQ(record(kX, kObject), StoreRefusal::kTruncated);
  EXPECT_EQ(record(whole.substr(0, whole.size() - 1), kHtml), StoreRefusal::kTruncated);
  EXPECT_TRUE(Ask(AnswerServer::Answer("200 OK", whole, kHtml), "get record").ok());
}

// A record that was cut or encoded on the way is not damaged: nothing may be put in its place for that.
TEST_F(S3AnswersTest, WhatIsNotWholeIsNoRecord) {
  const std::string whole = EncodeRecord("x", "content");
  const std::string part = whole.substr(0, whole.size() - 1);
  const std::string unframed = "HTTP/1.1 200 OK\r\nConnection: close\r\n" + kObject + "\r\n";
  for (const std::string& answer :
       {unframed + part, AnswerServer::Answer("203 Changed", part, kObject),
        AnswerServer::Answer("206 Partial Content", part, kObject),
        AnswerServer::Answer("200 OK", "\x1f\x8b", kObject + "Content-Encoding: gzip\r\n")}) {
    for (const char* what : {"get record", "put record"}) {
      const absl::Status status = Ask(answer, what);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status << answer;
    }
  }
  const std::string chunked = absl::StrFormat(
      "HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: "
      "chunked\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n",
      kObject, whole.size(), whole);
  EXPECT_TRUE(Ask(chunked, "get record").ok());
}

// One odd object keeps nobody from the others.
TEST_F(S3AnswersTest, AnOddObjectDoesNotCountAsAServerThatIsDown) {
  const AnswerServer server([](const std::string& request) {
    return request.find("/odd") != std::string::npos ? AnswerServer::Answer("200 OK", kPage, kHtml)
                                                     : AnswerServer::Answer("200 OK", kX, kObject);
  });
  S3Options options = server.Options();
  options.down_min = options.down_max = absl::Minutes(1);
  auto client = *S3Client::Create(options, &clock_);
  EXPECT_EQ(client->Get("odd", 1000, nullptr, nullptr, kX).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(client->Get("other", 10, nullptr, nullptr, kX).ok());
}

// A refusal that follows a try without an answer does not prove that nothing was put.
TEST_F(S3AnswersTest, APutThatMayHaveBeenCarriedOutIsNotToldAsUndone) {
  int puts = 0;
  const AnswerServer server([&puts](const std::string& request) {
    if (request.starts_with("GET"))
      return AnswerServer::Answer("404 Not Found", Error("NoSuchKey"));
    return ++puts % 2 == 1 ? AnswerServer::Answer("503 Slow Down", "")
                           : AnswerServer::Answer("400 Bad Request", Error("ExpiredToken"));
  });
  PiecesReader bytes({std::as_bytes(std::span(kX))});
  const absl::Status put = Client(server)->Put("a", bytes, nullptr);
  EXPECT_EQ(put.code(), absl::StatusCode::kUnavailable) << put;
  EXPECT_THAT(MessageOf(put), HasSubstr("ExpiredToken"));
  EXPECT_EQ(Store(Client(server))->PutRecord("x", "content").code(),
            absl::StatusCode::kUnavailable);
  // A race that was lost before may have been won by this very record.
  int races = 0;
  const AnswerServer racing([&races](const std::string& request) {
    if (request.starts_with("PUT")) {
      ++races;
      return AnswerServer::Answer("412 Precondition Failed", Error("PreconditionFailed"));
    }
    return races == 0 ? AnswerServer::Answer("404 Not Found", Error("NoSuchKey"))
                      : AnswerServer::Answer("400 Bad Request", Error("ExpiredToken"));
  });
  EXPECT_EQ(Store(Client(racing))->PutRecord("x", "content").code(),
            absl::StatusCode::kUnavailable);
}

// What answers may nest without end, or speak to a terminal.
TEST_F(S3AnswersTest, WhatAServerSaysIsBoundedAndSafeToShow) {
  std::string nested = "<Error>";
  for (int i = 0; i < 200000; ++i) nested += "<a>";
  for (const char* what : {"get", "put", "list", "remove"}) {
    EXPECT_FALSE(Ask(AnswerServer::Answer("500 Oh", nested), what).ok()) << what;
    EXPECT_FALSE(Ask(AnswerServer::Answer("200 OK", "<ListBucketResult>" + nested), what).ok())
        << what;
  }
  const absl::Status said = Ask(
      AnswerServer::Answer("403 Forbidden", Error("Bad&#27;[31mCode" + std::string(300, 'x'),
                                                  "red&#27;[31m&#155;" + std::string(500, 'y'))),
      "get");
  EXPECT_THAT(MessageOf(said), HasSubstr("no reason (red"));
  EXPECT_EQ(Ask(AnswerServer::Answer("404 Not Found", Error("No Such Key")), "get record").code(),
            absl::StatusCode::kUnavailable);
  for (const char c : MessageOf(said)) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << said;
  EXPECT_THAT(MessageOf(said), Not(HasSubstr("\xC2\x9B")));
  EXPECT_LT(MessageOf(said).size(), 600u);
}

// A state stays in the bucket unless its own bytes are damaged.
TEST_F(S3AnswersTest, AStateInPlaceOfWhichAPageCameIsNotRemoved) {
  const auto path = TestPath(1, 3);
  testing::MemoryBucket bucket;
  ASSERT_TRUE(Store(std::make_unique<testing::MemoryObjects>(&bucket))
                  ->Put(TestState(path).source(), nullptr)
                  .ok());
  const auto& [name, good] = *bucket.objects.begin();
  enum Kind { kGood, kPageOfThatLength, kOther, kShorter, kDamaged, kPutAnewMeanwhile };
  for (const Kind kind :
       {kGood, kPageOfThatLength, kOther, kShorter, kDamaged, kPutAnewMeanwhile}) {
    int ranges = 0;
    AnswerServer server([&, &name = name, &good = good](const std::string& request) {
      if (request.starts_with("DELETE")) return AnswerServer::Answer("204 No Content", "");
      if (request.find("list-type=2") != std::string::npos) {
        return AnswerServer::Answer(
            "200 OK", absl::StrFormat("<ListBucketResult><Contents><Key>%s</Key><Size>%d</Size>"
                                      "</Contents></ListBucketResult>",
                                      name, good.size()));
      }
      long begin = 0, end = 0;
      CHECK(sscanf(strstr(request.c_str(), "Range: bytes="), "Range: bytes=%ld-%ld", &begin,
                   &end) == 2);
      const auto length = static_cast<size_t>(end - begin + 1);
      if (kind == kPageOfThatLength) {
        return AnswerServer::Answer("200 OK", std::string(length, '<'), kHtml);
      }
      if (kind == kShorter) {
        return AnswerServer::Answer("416 Range Not Satisfiable", Error("InvalidRange"));
      }
      if (kind == kPutAnewMeanwhile && ++ranges > 1) {
        return AnswerServer::Answer(
            "206 Partial Content", good.substr(static_cast<size_t>(begin), length),
            absl::StrFormat("ETag: \"another\"\r\nContent-Range: bytes %d-%d/%d\r\n", begin, end,
                            good.size()));
      }
      std::string bytes = good;
      if (kind == kOther || kind == kDamaged) bytes[3] ^= 1;
      return AnswerServer::Answer(
          "206 Partial Content", bytes.substr(static_cast<size_t>(begin), length),
          absl::StrFormat("%sContent-Range: bytes %d-%d/%d\r\n", kObject, begin, end,
                          good.size() + (kind == kOther ? 1 : 0)));
    });
    auto store = Store(Client(server));
    ASSERT_TRUE(store->List().ok());
    TestTarget target(path);
    const absl::Status read = store->Read(target.target(), nullptr).status();
    const absl::StatusCode as[] = {absl::StatusCode::kOk,       absl::StatusCode::kUnavailable,
                                   absl::StatusCode::kNotFound, absl::StatusCode::kNotFound,
                                   absl::StatusCode::kDataLoss, absl::StatusCode::kNotFound};
    EXPECT_EQ(read.code(), as[kind]) << read;
    // One that was put anew is found again by the next listing.
    EXPECT_EQ(store->Has(path.back()), kind == kGood || kind == kPageOfThatLength) << kind;
    EXPECT_EQ(store->stats().refused[static_cast<size_t>(StoreRefusal::kBadMagic)],
              kind == kDamaged ? 1u : 0u);
    const auto requests = server.Stop();
    if (kind == kDamaged) {
      EXPECT_THAT(requests, Contains("DELETE"));
    } else {
      EXPECT_THAT(requests, Not(Contains("DELETE"))) << kind;
    }
  }
}

// One worker's listing is old: what another one put since must not go for what was there.
TEST_F(S3AnswersTest, AnObjectThatWasPutAnewIsNotRemovedForTheOldOne) {
  const auto path = TestPath(1, 3);
  testing::MemoryBucket bucket;
  ASSERT_TRUE(Store(std::make_unique<testing::MemoryObjects>(&bucket))
                  ->Put(TestState(path).source(), nullptr)
                  .ok());
  auto& [name, content] = *bucket.objects.begin();
  const std::string good = std::exchange(content, "");
  auto store = Store(std::make_unique<testing::MemoryObjects>(&bucket));
  ASSERT_TRUE(store->List().ok());
  bucket.objects[name] = good;
  TestTarget target(path);
  EXPECT_FALSE(store->Read(target.target(), nullptr).ok());
  EXPECT_TRUE(bucket.objects.contains(name));
  ASSERT_TRUE(store->List().ok());
  EXPECT_TRUE(store->Read(target.target(), nullptr).ok());
  // Also where nobody read the old one.
  bucket.objects[name] = "";
  auto other = Store(std::make_unique<testing::MemoryObjects>(&bucket));
  ASSERT_TRUE(other->List().ok());
  bucket.objects[name] = good;
  ASSERT_TRUE(other->List().ok());
  EXPECT_TRUE(other->Read(target.target(), nullptr).ok());
  EXPECT_FALSE(other->TakeChanges().empty());
}

// What a listing lacks counts as gone, so one that is cut is none; nor is one that never ends.
TEST_F(S3AnswersTest, AListingThatCannotBeReadToItsEndIsNone) {
  for (const auto& [next, says] :
       {std::pair("<IsTruncated>true</IsTruncated><NextMarker>a</NextMarker>", "ListObjectsV2"),
        std::pair("<IsTruncated>True</IsTruncated>"
                  "<NextContinuationToken>a</NextContinuationToken>",
                  "next after itself")}) {
    const absl::Status status =
        Ask(AnswerServer::Answer("200 OK",
                                 absl::StrFormat("<ListBucketResult>%s</ListBucketResult>", next)),
            "list");
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr(says));
  }
}

// Nor when the nesting is hidden from who only counts tags.
TEST_F(S3AnswersTest, NoNestedAnswerIsParsed) {
  for (const char* open : {"<a>", "<a><!--</a>-->", "<a><![CDATA[</a>]]>", "<a b=\"</a>\">",
                           "<a b=\"/>\">", "<a\"></a></a><a\">", "<a b='\"' c='\"></a>'>"}) {
    std::string page = "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
    for (int i = 0; i < 200'000; ++i) page += open;
    const absl::Status status = Ask(AnswerServer::Answer("200 OK", page), "list");
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << open << ": " << status;
  }
  const std::string flat = "<ListBucketResult a=\"</b>\"><c d='e' /><f><g/></f></ListBucketResult>";
  EXPECT_TRUE(Ask(AnswerServer::Answer("200 OK", flat), "list").ok());
}

// A refusal was an answer: what follows a lost one is told as unknown, and the server is asked on.
TEST_F(S3AnswersTest, ARefusalAfterALostAnswerIsNoServerThatIsDown) {
  int asked = 0;
  const AnswerServer server([&](const std::string&) {
    ++asked;
    if (asked == 1) return std::string();
    return asked == 2 ? AnswerServer::Answer("400 Bad Request", Error("ExpiredToken"))
                      : AnswerServer::Answer("200 OK", "", kETag);
  });
  S3Options options = server.Options();
  options.down_min = options.down_max = absl::Seconds(1);
  auto client = *S3Client::Create(options, &clock_);
  PiecesReader bytes({std::as_bytes(std::span(kX))});
  EXPECT_EQ(client->Put("a", bytes, nullptr).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(client->Put("a", bytes, nullptr).ok());
}

TEST_F(S3AnswersTest, AdviceIsThatOfTheCase) {
  const std::string quota =
      AnswerServer::Answer("400 Bad Request", Error("XMinioAdminBucketQuotaExceeded"));
  EXPECT_EQ(Ask(quota, "put").code(), absl::StatusCode::kResourceExhausted);
  // An object that comes whole where a part was asked for is as good as any.
  EXPECT_THAT(MessageOf(Ask(AnswerServer::Answer("200 OK", kX, kObject), "range")),
              Not(HasSubstr("remove the object")));
  const std::string weak = "Content-Type: application/octet-stream\r\nETag: W/\"1\"\r\n";
  EXPECT_EQ(RefusalOf(Ask(AnswerServer::Answer("200 OK", kX, weak), "get record")),
            StoreRefusal::kTruncated);
}

// Another format's record stays one that is not tried again, however it was met.
TEST_F(S3AnswersTest, AForeignRecordThatWonTheRaceIsForeign) {
  testing::MemoryBucket bucket;
  bucket.before_put_if = [&] {
    std::string foreign = EncodeRecord("x", "content");
    foreign[8] = 9;
    bucket.objects["records/x"] = foreign;
  };
  auto store = Store(std::make_unique<testing::MemoryObjects>(&bucket));
  EXPECT_TRUE(IsForeignRecord(store->PutRecord("x", "content")));
}

// Two workers may put one state below different parents: routers need not hear of both each time.
TEST_F(S3AnswersTest, TwoObjectsOfOneStateDoNotReplaceEachOther) {
  testing::MemoryBucket bucket;
  const auto path = TestPath(1, 4);
  auto store = Store(std::make_unique<testing::MemoryObjects>(&bucket));
  ASSERT_TRUE(store->Put(TestState(path).source(), nullptr).ok());
  StoredState other;
  ASSERT_TRUE(ParseObjectName(bucket.objects.begin()->first, &other));
  other.from = 2;
  other.parent = path[1];
  bucket.objects[ObjectNameOf(other)] = bucket.objects.begin()->second.substr(0, 500);
  store->TakeChanges();
  for (int again = 0; again < 2; ++again) {
    ASSERT_TRUE(store->List().ok());
    EXPECT_TRUE(store->TakeChanges().empty());
  }
}

}  // namespace
}  // namespace deltamesh
