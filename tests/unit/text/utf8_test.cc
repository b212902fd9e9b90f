// Incremental decoding against Python's bytes.decode("utf-8", "replace").
#include "runtime/text/utf8.h"

#include <cstdlib>

#include "tests/unit/text/text_test_util.h"

namespace deltamesh {
namespace {

std::string Hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) out += absl::StrFormat("%02x", static_cast<unsigned char>(c));
  return out;
}

// Mostly bytes of UTF-8 sequences that are cut, overlong, surrogates or beyond the last code point.
std::string RandomBytes(std::mt19937_64& rng) {
  static const unsigned char kEdges[] = {0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF,
                                         0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE,
                                         0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFF};
  std::string out;
  for (size_t n = rng() % 24; n > 0; --n) {
    const auto byte = rng() % 4 == 0 ? rng() % 256 : kEdges[rng() % sizeof(kEdges)];
    out.push_back(static_cast<char>(byte));
    if (rng() % 6 == 0) out += "中";
    if (rng() % 6 == 0) out += std::string("👍").substr(0, 1 + rng() % 4);
  }
  return out;
}

TEST(Utf8Test, EqualsPythonOnRandomBytesInAnyGrouping) {
  std::mt19937_64 rng(31);
  TempFolder folder;
  std::string in;
  std::vector<std::string> cases;
  for (int i = 0; i < 20'000; ++i) {
    cases.push_back(RandomBytes(rng));
    in += Hex(cases.back()) + "\n";
  }
  WriteAll(folder.path() / "in", in);
  WriteAll(folder.path() / "decode.py",
           "import sys\n"
           "with open(sys.argv[1]) as f, open(sys.argv[2], 'w') as out:\n"
           "    for line in f:\n"
           "        b = bytes.fromhex(line.strip())\n"
           "        try:\n"
           "            b.decode('utf-8')\n"
           "            bad = -1\n"
           "        except UnicodeDecodeError as e:\n"
           "            bad = e.start\n"
           "        s = b.decode('utf-8', 'replace')\n"
           "        print(bad, s.encode().hex(), file=out)\n");
  const std::string p = folder.path().string();
  const std::string command =
      absl::StrFormat("/usr/bin/python3 -B '%s/decode.py' '%s/in' '%s/out'", p, p, p);
  ASSERT_EQ(std::system(command.c_str()), 0);
  std::istringstream want(ReadAll(folder.path() / "out"));
  int whole = 0;
  for (const std::string& bytes : cases) {
    std::string line;
    std::getline(want, line);
    const auto bad = FirstInvalidUtf8(bytes);
    whole += !bad.has_value();
    ASSERT_EQ(absl::StrFormat("%d %s", bad ? static_cast<int>(*bad) : -1, Hex(DecodeUtf8(bytes))),
              line)
        << Hex(bytes);
    Utf8Assembler assembler;
    std::string pieces;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = std::min(bytes.size() - at, rng() % 4);
      const std::string out = assembler.Push(std::string_view(bytes).substr(at, n));
      ASSERT_EQ(FirstInvalidUtf8(out), std::nullopt);
      pieces += out;
      at += n;
    }
    pieces += assembler.Finish();
    ASSERT_EQ(pieces, DecodeUtf8(bytes)) << Hex(bytes);
  }
  EXPECT_GT(whole, 500);
}

TEST(Utf8Test, NothingIsHeldThatIsWhole) {
  Utf8Assembler assembler;
  EXPECT_EQ(assembler.Push("a\xf0\x9f"), "a");
  EXPECT_EQ(assembler.Push("\x91"), "");
  EXPECT_EQ(assembler.Push("\x8d"
                           "b"),
            "👍b");
  EXPECT_EQ(assembler.Push("\xe4\xb8"), "");
  EXPECT_EQ(assembler.Push("x"), "\xEF\xBF\xBDx");
  EXPECT_EQ(assembler.Push("\xc3"), "");
  EXPECT_EQ(assembler.Finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(assembler.Finish(), "");
  EXPECT_EQ(assembler.Push("\xa9"), "\xEF\xBF\xBD");
}

TEST(Utf8Test, PythonStrip) {
  EXPECT_EQ(PythonStrip(" \t\n\u3000\u00a0\u2028\x1f"
                        "a b\u0085 \r\n"),
            "a b");
  EXPECT_EQ(PythonStrip(" \u3000 "), "");
  EXPECT_EQ(PythonStrip(""), "");
  EXPECT_EQ(PythonStrip("\u180e中\u200b"), "\u180e中\u200b");  // not white space
  EXPECT_EQ(PythonStrip("a \xe3\x80"), "a \xe3\x80");          // cut off: stays inside
}

TEST(Utf8Test, CharactersOneByOne) {
  for (uint32_t code : {0u, 0x7Fu, 0x80u, 0x7FFu, 0x800u, 0xFFFFu, 0x10000u, 0x10FFFFu}) {
    std::string text;
    if (code < 0x80) {
      text.push_back(static_cast<char>(code));
    } else if (code < 0x800) {
      text = {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
    } else if (code < 0x10000) {
      text = {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)),
              static_cast<char>(0x80 | (code & 63))};
    } else {
      text = {static_cast<char>(0xF0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 63)),
              static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
    }
    EXPECT_EQ(FirstInvalidUtf8(text), std::nullopt) << code;
    EXPECT_EQ(Utf8CharAt(text, 0).code, code);
    EXPECT_EQ(Utf8CharAt(text, 0).bytes, text.size());
  }
}

}  // namespace
}  // namespace deltamesh
