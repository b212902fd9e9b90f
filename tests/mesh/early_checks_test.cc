// What a worker's flags are refused for before its model is read.
#include "services/worker/early_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

class EarlyChecksTest : public ::testing::Test {
 protected:
  EarlyChecksTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ / "file") << "x";
    flags.worker.routers = {"127.0.0.1:8081"};
    flags.worker.model = folder_;
  }
  ~EarlyChecksTest() override { std::filesystem::remove_all(folder_); }

  std::string Check() const {
    const absl::Status status = CheckStores(flags, [this](const char* name) {
      const auto found = environment.find(name);
      return found == environment.end() ? std::string() : found->second;
    });
    return status.ok() ? "" : std::string(status.message());
  }
  std::string Finish() {
    const absl::Status status = FinishWorkerFlags("decode", &flags.worker);
    return status.ok() ? "" : std::string(status.message());
  }
  std::string In(const char* name) const { return folder_ / name; }

  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / "early_checks_test";
  AttentionFlags flags;
  std::map<std::string, std::string> environment;
};

TEST_F(EarlyChecksTest, StoresAreLookedAt) {
  EXPECT_EQ(Check(), "");
  flags.store_s3 = "http://host:9000/bucket";
  EXPECT_THAT(Check(), HasSubstr("needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"));
  environment = {{"AWS_ACCESS_KEY_ID", "a"}, {"AWS_SECRET_ACCESS_KEY", "b"}};
  EXPECT_EQ(Check(), "");
  flags.store_s3 = "host:9000/bucket";
  EXPECT_THAT(Check(), HasSubstr("--store-s3: "));
  flags.store_s3 = "";
  flags.store_dir = In("file");
  EXPECT_THAT(Check(), HasSubstr("--store-dir: "));
  flags.store_dir = In("file/below");
  EXPECT_THAT(Check(), HasSubstr("--store-dir: "));
  flags.store_dir = In("made/on/the/way");
  EXPECT_EQ(Check(), "");
  EXPECT_TRUE(std::filesystem::is_directory(flags.store_dir));
  flags.cache_mib = 0;
  EXPECT_THAT(Check(), HasSubstr("raise --cache-mib above 0"));
}

// The name made up for who has none is another one after a restart, and routers would wait for the old.
TEST_F(EarlyChecksTest, WithAStoreTheNameMustBeGiven) {
  EXPECT_TRUE(CheckStoreName(flags).ok());
  for (std::string* store : {&flags.store_dir, &flags.store_s3}) {
    *store = "somewhere";
    const absl::Status status = CheckStoreName(flags);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--name: is missing; with --store-"));
    flags.worker.name = "decode-0";
    EXPECT_TRUE(CheckStoreName(flags).ok());
    flags.worker.name = *store = "";
  }
}

TEST_F(EarlyChecksTest, SoIsWhatEveryWorkerHas) {
  for (const char* router :
       {"localhost", "localhost:0", "localhost:x", "a b:1", "", "ipv4:", "ipv4:10.0.0.1",
        "ipv4:10.0.0.1:99999", "ipv6:::1", "unix:", "unix-abstract:", "dns:///",
        "http://127.0.0.1:8081", "xds:///router:8081"}) {
    flags.worker.routers = {"127.0.0.1:8081", router};
    EXPECT_THAT(Finish(), HasSubstr("--router: ")) << router;
  }
  flags.worker.routers = {"[::1]:8081",         "router.mesh:8081", "dns:///router:8081",
                          "dns:router",         "unix:/tmp/r",      "unix-abstract:router",
                          "ipv4:10.0.0.1:8081", "ipv6:[::1]:8081"};
  EXPECT_EQ(Finish(), "");
  flags.worker.name = std::string(257, 'n');
  EXPECT_THAT(Finish(), HasSubstr("--name: 257 bytes; use at most 256"));
  for (const char* odd : {"a b", "a\xff", "a\033[1m", "a\xc3\xa9", "a\n"}) {
    flags.worker.name = odd;
    EXPECT_THAT(Finish(), HasSubstr("--name: byte 2 of \"a")) << odd;
  }
  flags.worker.name = "rack1/decode-0.mesh_A:8081";
  EXPECT_EQ(Finish(), "");
  flags.worker.name = "n";
  flags.worker.packed_dir = In("file");
  EXPECT_THAT(Finish(), HasSubstr("--packed-dir: "));
  flags.worker.packed_dir = "off";
  flags.worker.ports_file = In("nowhere/ports");
  EXPECT_THAT(Finish(), HasSubstr("--ports-file: "));
  flags.worker.ports_file = folder_;
  EXPECT_THAT(Finish(), HasSubstr("is a folder; name a file"));
  flags.worker.ports_file = In("ports");
  EXPECT_EQ(Finish(), "");
}

}  // namespace
}  // namespace deltamesh
