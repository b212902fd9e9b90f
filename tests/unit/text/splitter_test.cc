// The split pattern against the oracle's hand-written splitter, and the cuts of giant inputs.
#include "runtime/text/splitter.h"

#include <gmock/gmock.h>

#include <cstdlib>

#include "runtime/text/utf8.h"
#include "tests/unit/text/text_test_util.h"

namespace deltamesh {
namespace {

using Pieces = std::vector<std::string>;

Pieces SplitWith(const Splitter& splitter, const std::string& text) {
  std::vector<std::string_view> pieces;
  const Splitter::ScratchPtr scratch = splitter.NewScratch();
  CHECK_OK(splitter.Split(text, *scratch, pieces));
  return {pieces.begin(), pieces.end()};
}

TEST(SplitterTest, EqualsTheOracleOnRandomStrings) {
  constexpr int kCases = 20'000;
  TempFolder folder;
  const std::string source = DELTAMESH_SOURCE_DIR;
  const std::string out = (folder.path() / "cases.json").string();
  const std::string command = absl::StrFormat(
      "/usr/bin/python3 -B '%s/tests/unit/text/split_oracle.py' "
      "'%s/tests/data/reference.py' %d '%s'",
      source, source, kCases, out);
  ASSERT_EQ(std::system(command.c_str()), 0) << command << " failed; is python3-numpy installed?";
  const Json cases = Json::parse(ReadAll(out));
  ASSERT_EQ(cases.size(), kCases);
  auto splitter = Splitter::Create();
  ASSERT_TRUE(splitter.ok()) << splitter.status();
  int different = 0;
  for (const Json& c : cases) {
    const Pieces got = SplitWith(*splitter, c[0].get<std::string>());
    if (got != c[1].get<Pieces>() && ++different <= 5) {
      ADD_FAILURE() << "text " << c[0].dump(-1, ' ', true) << "\n want " << c[1].dump(-1, ' ', true)
                    << "\n  got " << Json(got).dump(-1, ' ', true);
    }
  }
  EXPECT_EQ(different, 0);
}

TEST(SplitterTest, HanOfLaterUnicodeVersions) {
  auto splitter = Splitter::Create();
  ASSERT_TRUE(splitter.ok());
  EXPECT_THAT(SplitWith(*splitter, "中\U00031350\U0002ebf0\U0002b739ab"),
              ::testing::ElementsAre("中\U00031350\U0002ebf0\U0002b739", "ab"));
  EXPECT_THAT(SplitWith(*splitter, "中、文"), ::testing::ElementsAre("中", "、", "文"));
}

TEST(SplitterTest, WordsOfHalfAMillionLetters) {
  auto splitter = Splitter::Create();
  ASSERT_TRUE(splitter.ok());
  for (const char* unit : {"a", "A", "ª", "中", "한", "\u0301", " ", "\n", "!"}) {
    std::string text;
    for (int i = 0; i < 500'000; ++i) text += unit;
    const Pieces pieces = SplitWith(*splitter, text);
    EXPECT_EQ(pieces.size(), 1) << unit;
  }
}

Pieces Cut(const std::string& text) {
  const auto parts = CutGiantText(text);
  return {parts.begin(), parts.end()};
}

std::string Times(std::string_view unit, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) out += unit;
  return out;
}

TEST(CutGiantTextTest, RunsOfOneKind) {
  EXPECT_TRUE(Cut("").empty());
  const std::string run = Times("é", kMaxRunChars);
  EXPECT_EQ(Cut(run), Pieces{run});
  EXPECT_EQ(Cut(run + "x"), (Pieces{run, "x"}));
  const std::string word = absl::StrFormat("a%s", run);
  EXPECT_EQ(Cut(word), (Pieces{word.substr(0, word.size() - 2), "é"}));
  EXPECT_EQ(Cut(run + " " + run), Pieces{run + " " + run});
  const std::string blanks = Times("\u3000", kMaxRunChars);
  EXPECT_EQ(Cut("ab" + blanks + "\x1c" + "c"), (Pieces{"ab" + blanks,
                                                       "\x1c"
                                                       "c"}));
  EXPECT_EQ(Cut(run + run + run), (Pieces{run, run, run}));
}

TEST(CutGiantTextTest, SlicesOfManyCharacters) {
  const std::string unit = "中 ";
  const std::string slice = Times(unit, kMaxSliceChars / 2);
  EXPECT_EQ(Cut(slice), Pieces{slice});
  EXPECT_EQ(Cut(slice + "ab"), (Pieces{slice, "ab"}));
  // A run starts anew with a slice.
  const std::string tail = Times("x", kMaxRunChars);
  const std::string head = Times("a ", kMaxSliceChars / 2 - 1) + "yz";
  EXPECT_EQ(Cut(head + tail), (Pieces{head, tail}));
}

TEST(CutGiantTextTest, CutsChangeTokens) {
  const auto t = GoldenTokenizer("kimi_linear");
  const std::string text = Times("a", kMaxRunChars) + "bc";
  const auto pieces = *t->SplitText(text);
  ASSERT_EQ(pieces.size(), 2);
  EXPECT_EQ(pieces[1], "bc");
}

}  // namespace
}  // namespace deltamesh
