// Byte pair encoding against the definition, carried out one merge at a time.
#include "runtime/text/bpe.h"

#include <chrono>

#include "absl/strings/escaping.h"
#include "tests/unit/text/text_test_util.h"

namespace deltamesh {
namespace {

std::vector<TokenId> BruteForce(const Vocabulary& v, const std::string& piece) {
  if (v.Find(piece) != Vocabulary::kNone) return {v.Find(piece)};
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  for (;;) {
    TokenId best = Vocabulary::kNone;
    size_t at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const TokenId rank = v.Find(parts[i] + parts[i + 1]);
      if (rank != Vocabulary::kNone && (best == Vocabulary::kNone || rank < best)) {
        best = rank;
        at = i;
      }
    }
    if (best == Vocabulary::kNone) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<int64_t>(at) + 1);
  }
  std::vector<TokenId> ids;
  for (const std::string& p : parts) ids.push_back(v.Find(p));
  return ids;
}

// All bytes, then `extra` random tokens over the first letters, so that merges compete and chain;
// some cannot be reached by merges at all.
Vocabulary RandomVocabulary(std::mt19937_64& rng, int letters, int extra) {
  std::string file;
  for (int b = 0; b < 256; ++b) {
    file +=
        absl::Base64Escape(std::string(1, static_cast<char>(b))) + " " + std::to_string(b) + "\n";
  }
  std::vector<std::string> tokens;
  while (static_cast<int>(tokens.size()) < extra) {
    std::string token;
    const int n = 2 + static_cast<int>(rng() % 5);
    for (int i = 0; i < n; ++i) token.push_back(static_cast<char>('a' + rng() % letters));
    if (std::find(tokens.begin(), tokens.end(), token) != tokens.end()) continue;
    file += absl::Base64Escape(token) + " " + std::to_string(256 + tokens.size()) + "\n";
    tokens.push_back(token);
  }
  auto v = Vocabulary::Parse(file, "random");
  CHECK_OK(v.status());
  return *std::move(v);
}

TEST(BpeTest, EqualsTheDefinitionOnRandomVocabularies) {
  std::mt19937_64 rng(11);
  for (int round = 0; round < 60; ++round) {
    const int letters = 2 + static_cast<int>(rng() % 3);
    const Vocabulary v = RandomVocabulary(rng, letters, 20 + static_cast<int>(rng() % 30));
    BytePairEncoder encoder(v);
    for (int i = 0; i < 100; ++i) {
      std::string piece;
      const int n = 1 + static_cast<int>(rng() % 60);
      for (int k = 0; k < n; ++k) piece.push_back(static_cast<char>('a' + rng() % letters));
      std::vector<TokenId> got;
      encoder.Encode(piece, got);
      ASSERT_EQ(got, BruteForce(v, piece)) << piece;
    }
  }
}

TEST(BpeTest, EqualsTheDefinitionOnTheGoldenVocabulary) {
  const auto v = Vocabulary::Parse(ReadAll(GoldenFolder("kimi_k3") / "tiktoken.model"), "golden");
  ASSERT_TRUE(v.ok()) << v.status();
  BytePairEncoder encoder(*v);
  std::mt19937_64 rng(12);
  for (int i = 0; i < 500; ++i) {
    const std::string piece = RandomText(rng, 80) + "the state * decay";
    std::vector<TokenId> got;
    encoder.Encode(piece, got);
    ASSERT_EQ(got, BruteForce(*v, piece));
  }
}

TEST(BpeTest, EmptyPieceAndAppending) {
  std::mt19937_64 rng(1);
  const Vocabulary v = RandomVocabulary(rng, 2, 3);
  BytePairEncoder encoder(v);
  std::vector<TokenId> got = {1};
  encoder.Encode("", got);
  encoder.Encode("z", got);
  EXPECT_EQ(got, (std::vector<TokenId>{1, 'z'}));
}

TEST(BpeTest, LongPiecesAreNotQuadratic) {
  std::mt19937_64 rng(13);
  const Vocabulary v = RandomVocabulary(rng, 3, 60);
  BytePairEncoder encoder(v);
  std::string piece;
  for (int i = 0; i < 1'000'000; ++i) piece.push_back(static_cast<char>('a' + rng() % 3));
  const auto start = std::chrono::steady_clock::now();
  std::vector<TokenId> got;
  encoder.Encode(piece, got);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 10.0);  // quadratic would take minutes
  std::string back;
  for (const TokenId id : got) back += v.Bytes(id);
  EXPECT_EQ(back, piece);
}

}  // namespace
}  // namespace deltamesh
