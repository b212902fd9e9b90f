// Addresses as people write them.
#include "services/common/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "services/common/http_server.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Only takes up a port.
class SilentHandler final : public HttpHandler {
 public:
  void Handle(HttpRequest, std::shared_ptr<HttpResponder>) override {}
};

TEST(AddressTest, WhatPeopleWriteIsReadOrRefusedByName) {
  const std::vector<std::tuple<const char*, const char*, int>> good = {
      {"localhost:8080", "localhost", 8080}, {"0.0.0.0:0", "0.0.0.0", 0},
      {"[::]:65535", "::", 65535},           {"[::1]:8080", "::1", 8080},
      {"[fe80::1%lo]:1", "fe80::1%lo", 1},
  };
  for (const auto& [text, host, port] : good) {
    const auto at = ParseHostPort("--http", text);
    ASSERT_TRUE(at.ok()) << at.status();
    EXPECT_EQ(at->first, host);
    EXPECT_EQ(at->second, port);
    EXPECT_EQ(JoinHostPort(host, port), text);
  }
  for (const char* text :
       {"", "8080", ":8080", "localhost", "localhost:", "localhost:x", "localhost:65536",
        "localhost:-1", "::1:8080", "[::1]", "[::1:80", "[]:80", "http://localhost:80", "a b:80"}) {
    const absl::Status status = ParseHostPort("--http", text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
    EXPECT_THAT(std::string(status.message()), StartsWith("--http: ")) << text;
  }
}

TEST(AddressTest, WhatCannotBeListenedOnIsKnownBefore) {
  EXPECT_TRUE(CheckListen("--http", "localhost:0").ok());
  const absl::StatusOr<std::string> local = NumericHost("--transport-listen", "localhost");
  ASSERT_TRUE(local.ok()) << local.status();
  EXPECT_TRUE(*local == "127.0.0.1" || *local == "::1") << *local;
  for (const char* numeric : {"127.0.0.1", "0.0.0.0", "::1", "::", "192.0.2.7", "fe80::1%lo"}) {
    EXPECT_EQ(NumericHost("--x", numeric).value_or(""), numeric);
  }
  for (const char* text : {"", "no-such-host.invalid", "a b"}) {
    const absl::Status status = NumericHost("--transport-listen", text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--transport-listen"));
  }
  for (const char* text : {"192.0.2.1:0", "no.such.host.invalid:80"}) {
    const absl::Status status = CheckListen("--http", text);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is no address of this machine"));
  }
  SilentHandler handler;
  const auto server = HttpServer::Start({}, &handler);
  ASSERT_TRUE(server.ok());
  const absl::Status taken = CheckListen("--http", (*server)->address());
  EXPECT_TRUE(absl::IsUnavailable(taken)) << taken;
  EXPECT_THAT(std::string(taken.message()), HasSubstr((*server)->address()));
}

}  // namespace
}  // namespace deltamesh
