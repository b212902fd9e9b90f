// The keys below were made with Python's hashlib from the definition in the header.
#include "runtime/prefix/prefix_hash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace deltamesh {
namespace {

std::vector<TokenId> Counting(size_t count) {
  std::vector<TokenId> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

std::vector<PrefixKey> KeysOf(std::string_view model, std::string_view salt,
                              const std::vector<TokenId>& tokens) {
  PrefixChain chain(model, salt);
  chain.Append(tokens);
  return chain.keys();
}

TEST(PrefixChain, EqualsTheDefinition) {
  const std::vector<PrefixKey> keys = KeysOf("m", "", Counting(130));
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0].Hex(), "b2968e10ef16e3f2887b2528d57a8d9f");
  EXPECT_EQ(keys[1].Hex(), "78e0192003358307726284505e6dde96");
  EXPECT_EQ(keys[0].index(), 0xf2e316ef108e96b2u);

  std::vector<TokenId> wide;  // all four bytes of a token enter
  for (int64_t i = 0; i < 64; ++i) {
    wide.push_back(static_cast<TokenId>(i * 2654435761 & 0x7fffffff));
  }
  EXPECT_EQ(KeysOf("m", "", wide)[0].Hex(), "332b6f1c068909693b2b80258b26a492");
}

TEST(PrefixChain, ModelAndSaltMakeOtherNamesAndDoNotRunTogether) {
  EXPECT_EQ(KeysOf("m", "s", Counting(64))[0].Hex(), "d239a06725719d920922bb066e5aa505");
  EXPECT_EQ(KeysOf("ms", "", Counting(64))[0].Hex(), "c60f23e9b4dbc119fc7188c5d9dc4175");
  const std::string_view long_salt("s\0s", 3);
  EXPECT_NE(KeysOf("m", long_salt, Counting(64)), KeysOf("m", "s", Counting(64)));
}

TEST(PrefixChain, AnySplitOfAppendsGivesTheSameKeys) {
  const std::vector<TokenId> tokens = Counting(1000);
  const std::vector<PrefixKey> whole = KeysOf("m", "s", tokens);
  ASSERT_EQ(whole.size(), 15u);
  for (const size_t piece : {1u, 7u, 63u, 64u, 65u, 200u}) {
    PrefixChain chain("m", "s");
    for (size_t i = 0; i < tokens.size(); i += piece) {
      chain.Append(std::span(tokens).subspan(i, std::min(piece, tokens.size() - i)));
    }
    EXPECT_EQ(chain.keys(), whole) << piece;
    EXPECT_EQ(chain.tokens(), 1000);
  }
}

TEST(PrefixChain, OneTokenChangesEveryLaterKeyAndNoEarlierOne) {
  const std::vector<PrefixKey> before = KeysOf("m", "", Counting(640));
  for (const size_t at : {0u, 63u, 64u, 300u, 639u}) {
    std::vector<TokenId> tokens = Counting(640);
    tokens[at] ^= 1;
    const std::vector<PrefixKey> after = KeysOf("m", "", tokens);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(before[i] == after[i], i < at / 64) << at << " " << i;
    }
  }
  EXPECT_EQ(std::set<PrefixKey>(before.begin(), before.end()).size(), before.size());
}

}  // namespace
}  // namespace deltamesh
