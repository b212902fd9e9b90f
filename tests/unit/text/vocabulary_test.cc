#include "runtime/text/vocabulary.h"

#include "absl/strings/escaping.h"
#include "tests/unit/text/text_test_util.h"

namespace deltamesh {
namespace {

std::string Line(std::string_view bytes, int rank) {
  return absl::Base64Escape(ToAbsl(bytes)) + " " + std::to_string(rank) + "\n";
}

std::string AllBytes() {
  std::string out;
  for (int b = 0; b < 256; ++b) out += Line(std::string(1, static_cast<char>(b)), b);
  return out;
}

TEST(VocabularyTest, ReadsTokensInAnyOrder) {
  const auto v = Vocabulary::Parse(
      std::string("\n") + Line("abc", 257) + AllBytes() + "\r\n" + Line("ab", 256), "f");
  ASSERT_TRUE(v.ok()) << v.status();
  EXPECT_EQ(v->size(), 258);
  EXPECT_EQ(v->Bytes(256), "ab");
  EXPECT_EQ(v->Find("abc"), 257);
  EXPECT_EQ(v->Find("abcd"), Vocabulary::kNone);
  EXPECT_EQ(v->Find("ac"), Vocabulary::kNone);
  EXPECT_EQ(v->Find(""), Vocabulary::kNone);
  EXPECT_EQ(v->Find(std::string(1, '\0')), 0);
}

TEST(VocabularyTest, ErrorsNameTheLine) {
  const std::string all = AllBytes();
  const auto code = absl::StatusCode::kInvalidArgument;
  ExpectError(Vocabulary::Parse(all + "####\n", "f").status(), code, {"f:257", "base64 rank"});
  ExpectError(Vocabulary::Parse(all + "YQ== 256 7\n", "f").status(), code,
              {"f:257", "base64 rank"});
  ExpectError(Vocabulary::Parse(all + "#### 256\n", "f").status(), code,
              {"f:257", "####", "not base64"});
  ExpectError(Vocabulary::Parse(all + "YWI 256\n", "f").status(), code,
              {"f:257", "YWI", "not base64"});
  ExpectError(Vocabulary::Parse(all + "YWI= x\n", "f").status(), code, {"f:257", "\"x\""});
  ExpectError(Vocabulary::Parse(all + "YWI= -1\n", "f").status(), code, {"f:257", "\"-1\""});
  ExpectError(Vocabulary::Parse(all + "YWI= 99999999999\n", "f").status(), code,
              {"f:257", "99999999999"});
  ExpectError(Vocabulary::Parse(all + Line("ab", 3), "f").status(), code,
              {"f:257", "rank 3", "line 4"});
  ExpectError(Vocabulary::Parse(all + Line("a", 256), "f").status(), code,
              {"f:257", "same as in line 98", "once"});
  ExpectError(Vocabulary::Parse(all + Line("ab", 257), "f").status(), code,
              {"f: rank 256 is missing", "257 is the highest"});
  std::string few;
  for (int b = 0; b < 255; ++b) few += Line(std::string(1, static_cast<char>(b)), b);
  ExpectError(Vocabulary::Parse(few, "f").status(), code, {"f", "0xff"});
  ExpectError(Vocabulary::Parse("", "f").status(), code, {"f", "0x00"});
}

}  // namespace
}  // namespace deltamesh
