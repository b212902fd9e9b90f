// Incremental text and stop strings against twins that see everything at once.
#include "runtime/text/text_stream.h"

#include "tests/unit/text/text_test_util.h"

namespace deltamesh {
namespace {

struct Outcome {
  std::string text;
  std::string stop;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

std::ostream& operator<<(std::ostream& out, const Outcome& o) {
  return out << "{\"" << o.text << "\", stop \"" << o.stop << "\"}";
}

// The definition: the match that starts earliest, the shortest of those.
Outcome BruteForce(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t at = 0; at < text.size(); ++at) {
    const std::string* best = nullptr;
    for (const std::string& stop : stops) {
      if (text.compare(at, stop.size(), stop) == 0 &&
          (best == nullptr || stop.size() < best->size())) {
        best = &stop;
      }
    }
    if (best != nullptr) return {text.substr(0, at), *best};
  }
  return {text, ""};
}

Outcome Filter(const std::string& text, const std::vector<std::string>& stops, std::mt19937_64& rng,
               size_t most) {
  auto filter = StopFilter::Create(stops);
  CHECK_OK(filter.status());
  const Outcome want = BruteForce(text, stops);
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t n = std::min(text.size() - at, 1 + rng() % most);
    out += filter->Push(std::string_view(text).substr(at, n));
    at += n;
    EXPECT_TRUE(want.text.starts_with(out));  // nothing is ever taken back
  }
  out += filter->Finish();
  EXPECT_EQ(filter->stopped(), !filter->stop_string().empty());
  EXPECT_EQ(filter->Push("more"), filter->stopped() ? "" : filter->Push("more"));
  return {out, filter->stop_string()};
}

TEST(StopFilterTest, EqualsTheDefinitionInAnyGrouping) {
  std::mt19937_64 rng(21);
  int stopped = 0;
  for (int round = 0; round < 20'000; ++round) {
    const auto word = [&](size_t most) {
      std::string out;
      for (size_t n = 1 + rng() % most; n > 0; --n)
        out.push_back(static_cast<char>('a' + rng() % 2));
      return out;
    };
    std::vector<std::string> stops(rng() % 4);
    for (auto& stop : stops) stop = word(6);
    const std::string text = word(24);
    const Outcome want = BruteForce(text, stops);
    for (size_t most : {1, 2, 5, 100}) ASSERT_EQ(Filter(text, stops, rng, most), want) << text;
    stopped += !want.stop.empty();
  }
  EXPECT_GT(stopped, 5000);
}

TEST(StopFilterTest, HoldsBackOnlyWhatMayMatch) {
  auto filter = StopFilter::Create({"END", "STOP"});
  ASSERT_TRUE(filter.ok());
  EXPECT_EQ(filter->Push("a cat E"), "a cat ");
  EXPECT_EQ(filter->Push("N"), "");
  EXPECT_EQ(filter->Push("x"), "ENx");
  EXPECT_EQ(filter->Push("ST"), "");
  EXPECT_EQ(filter->Push("OP tail"), "");
  EXPECT_TRUE(filter->stopped());
  EXPECT_EQ(filter->stop_string(), "STOP");
  EXPECT_EQ(filter->Push("more"), "");
  EXPECT_EQ(filter->Finish(), "");
}

TEST(StopFilterTest, AnEarlierLongerStopIsWaitedFor) {
  auto filter = StopFilter::Create({"abcd", "c"});
  ASSERT_TRUE(filter.ok());
  EXPECT_EQ(filter->Push("xabc"), "x");
  EXPECT_FALSE(filter->stopped());  // "abcd" would start earlier than "c"
  EXPECT_EQ(filter->Push("!"), "ab");
  EXPECT_EQ(filter->stop_string(), "c");

  auto other = StopFilter::Create({"abcd", "c"});
  EXPECT_EQ(other->Push("xabc"), "x");
  EXPECT_EQ(other->Finish(), "ab");
  EXPECT_EQ(other->stop_string(), "c");
}

TEST(StopFilterTest, Errors) {
  const auto code = absl::StatusCode::kInvalidArgument;
  ExpectError(StopFilter::Create(std::vector<std::string>(17, "x")).status(), code,
              {"stop: 17", "at most 16"});
  ExpectError(StopFilter::Create({"a", ""}).status(), code, {"stop[1]", "0 bytes", "1 to 256"});
  ExpectError(StopFilter::Create({std::string(257, 'x')}).status(), code, {"stop[0]", "257"});
  ExpectError(StopFilter::Create({"a\xff"}).status(), code, {"stop[0]", "byte 1", "UTF-8"});
  EXPECT_TRUE(StopFilter::Create(std::vector<std::string>(16, std::string(256, 'x'))).ok());
  const auto tokenizer = GoldenTokenizer("kimi_k3");
  ExpectError(TextStream::Create(*tokenizer, {.stops = {""}}).status(), code, {"stop[0]"});
}

Outcome Stream(const Tokenizer& tokenizer, const std::vector<TokenId>& ids,
               TextStream::Options options, std::mt19937_64& rng, size_t most) {
  auto stream = TextStream::Create(tokenizer, std::move(options));
  CHECK_OK(stream.status());
  std::string out;
  for (size_t at = 0; at < ids.size();) {
    const size_t n = std::min(ids.size() - at, 1 + rng() % most);
    const std::string text = stream->Push(std::span(ids).subspan(at, n));
    EXPECT_EQ(FirstInvalidUtf8(text), std::nullopt);  // whole characters only
    out += text;
    at += n;
  }
  out += stream->Finish();
  return {out, stream->stop_string()};
}

TEST(TextStreamTest, RandomTokensInAnyGrouping) {
  const auto tokenizer = GoldenTokenizer("kimi_linear");
  std::mt19937_64 rng(22);
  for (int round = 0; round < 2000; ++round) {
    std::vector<TokenId> ids;
    std::string shown;
    for (int i = 0; i < 30; ++i) {
      ids.push_back(
          static_cast<TokenId>(rng() % (round % 2 == 0 ? 780 : 256)));  // some out of range
      if (!tokenizer->is_special(ids.back())) shown += tokenizer->TokenBytes(ids.back());
    }
    const std::string text = DecodeUtf8(shown);
    std::vector<std::string> stops;
    if (rng() % 2 == 0) stops = {"\xEF\xBF\xBD", "a", "the"};
    const Outcome want = BruteForce(text, stops);
    for (size_t most : {1, 4, 100}) {
      ASSERT_EQ(Stream(*tokenizer, ids, {.stops = stops}, rng, most), want);
    }
    ASSERT_EQ(Stream(*tokenizer, ids, {.show_special = true}, rng, 3).text, tokenizer->Decode(ids));
  }
}

TEST(TextStreamTest, StopStringAcrossTokensAndSplitCharacters) {
  const auto tokenizer = GoldenTokenizer("kimi_linear");
  std::mt19937_64 rng(23);
  const auto ids = *tokenizer->EncodeOrdinary("Say 👍中文 end");
  EXPECT_EQ(Stream(*tokenizer, ids, {.stops = {"中文"}}, rng, 1), (Outcome{"Say 👍", "中文"}));
  EXPECT_EQ(Stream(*tokenizer, ids, {.stops = {"👍中"}}, rng, 1), (Outcome{"Say ", "👍中"}));
  EXPECT_EQ(Stream(*tokenizer, ids, {.stops = {"文 ends"}}, rng, 1),
            (Outcome{"Say 👍中文 end", ""}));
}

}  // namespace
}  // namespace deltamesh
