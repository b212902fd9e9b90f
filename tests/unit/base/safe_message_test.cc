#include "runtime/base/safe_message.h"

#include <gtest/gtest.h>

#include <random>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

const std::string kBad = "\xEF\xBF\xBD";

TEST(SafeMessage, WellFormedTextStays) {
  for (const std::string text : {"", "plain", "é", "中", "\xF0\x9F\x98\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_EQ(SafeMessage(text), text);
  }
  const std::string with_nul("a\0b", 3);
  EXPECT_EQ(SafeMessage(with_nul), with_nul);
}

TEST(SafeMessage, IllFormedBytesAreReplaced) {
  EXPECT_EQ(SafeMessage("a\xFFz"), "a" + kBad + "z");
  EXPECT_EQ(SafeMessage("\xC0\x80"), kBad + kBad);                     // overlong
  EXPECT_EQ(SafeMessage("\xED\xA0\x80"), kBad + kBad + kBad);          // surrogate
  EXPECT_EQ(SafeMessage("\xF4\x90\x80\x80").size(), 4 * kBad.size());  // above U+10FFFF
  EXPECT_EQ(SafeMessage("\xE0\x9F\xBF").size(), 3 * kBad.size());      // overlong
  EXPECT_EQ(SafeMessage("end\xE4\xB8"), "end" + kBad + kBad);          // cut
}

TEST(SafeMessage, CutsBetweenCharacters) {
  EXPECT_EQ(SafeMessage("abc", 2), "ab");
  EXPECT_EQ(SafeMessage("a中b", 3), "a");
  EXPECT_EQ(SafeMessage("a中b", 4), "a中");
  EXPECT_EQ(SafeMessage("\xFF", 2), "");
  EXPECT_EQ(SafeMessage(std::string(5000, 'x')).size(), kMessageBytesMax);
}

TEST(SafeMessage, RandomBytesBecomeAFixedPoint) {
  std::mt19937_64 rng(1);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (size_t i = rng() % 40; i > 0; --i) bytes.push_back(static_cast<char>(rng()));
    const std::string safe = SafeMessage(bytes, 64);
    EXPECT_LE(safe.size(), 64u);
    EXPECT_EQ(SafeMessage(safe, 64), safe);
  }
}

TEST(SafeMessage, AnEmptyStatusHasItsCodesName) {
  EXPECT_EQ(SafeMessage(absl::Status(absl::StatusCode::kDataLoss, "")), "DATA_LOSS");
  EXPECT_EQ(SafeMessage(DataLoss("layer %d", 3)), "layer 3");
}

}  // namespace
}  // namespace deltamesh
