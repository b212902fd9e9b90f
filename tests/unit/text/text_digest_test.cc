// Any change of a file that text depends on shows in the digest.
#include "runtime/text/text_digest.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;

class TextDigestTest : public ::testing::Test {
 protected:
  TextDigestTest() : folder_(fs::path(::testing::TempDir()) / "text_digest_test") {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~TextDigestTest() override { fs::remove_all(folder_); }

  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }
  std::string Digest() {
    absl::StatusOr<std::string> digest = TextDigest(folder_);
    CHECK_OK(digest.status());
    return *digest;
  }

  const fs::path folder_;
};

TEST_F(TextDigestTest, EveryFileCountsAndNothingElseDoes) {
  EXPECT_EQ(TextDigest(folder_).status().code(), absl::StatusCode::kNotFound);
  std::set<std::string> seen;
  Write("config.json", "{}");
  EXPECT_TRUE(seen.insert(Digest()).second);
  EXPECT_EQ(Digest().size(), 64u);
  for (const char* name : {"tiktoken.model", "tokenizer_config.json", "generation_config.json",
                           "chat_literals.json"}) {
    for (const char* bytes : {"", "a", "b"}) {
      Write(name, bytes);
      EXPECT_TRUE(seen.insert(Digest()).second) << name << " " << bytes;
    }
  }
  Write("config.json", "{ }");
  EXPECT_TRUE(seen.insert(Digest()).second);
  const std::string before = Digest();
  Write("model.safetensors", "weights");
  EXPECT_EQ(Digest(), before);
}

TEST_F(TextDigestTest, GoldenModelsDifferAndHaveTheSumAnotherToolGives) {
  const fs::path golden = fs::path(DELTAMESH_SOURCE_DIR) / "tests/data/golden";
  const auto k3 = TextDigest(golden / "kimi_k3_tiny");
  const auto linear = TextDigest(golden / "kimi_linear_tiny");
  ASSERT_TRUE(k3.ok() && linear.ok());
  EXPECT_EQ(*k3, "f90dbb238a608405c0f9b9a58a9ba1b79d3bd449964045965f07631c602cb052");
  EXPECT_EQ(*linear, "97cc38f97ce257077a93a01f3aae763b63b8c00e1672408d855f3835f9701860");
}

}  // namespace
}  // namespace deltamesh
