// Tokenizer against the golden cases of both families, and its errors.
#include "runtime/text/tokenizer.h"

#include <gmock/gmock.h>

#include <chrono>

#include "tests/unit/text/text_test_util.h"

namespace deltamesh {
namespace {

using ::testing::ElementsAre;
using Ids = std::vector<TokenId>;

class GoldenTokenizerTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Families, GoldenTokenizerTest,
                         ::testing::Values("kimi_k3", "kimi_linear"));

TEST_P(GoldenTokenizerTest, GoldenCases) {
  const auto t = GoldenTokenizer(GetParam());
  const Json golden = GoldenJson(GetParam())["tokenizer"];
  ASSERT_EQ(golden.size(), 10);
  for (const Json& c : golden) {
    const auto text = c["text"].get<std::string>();
    SCOPED_TRACE(text);
    EXPECT_EQ(*t->EncodeOrdinary(text), c["ids_no_special"].get<Ids>());
    EXPECT_EQ(*t->EncodeSegments(std::vector<Segment>{{text, true}}), c["ids"].get<Ids>());
    EXPECT_EQ(*t->EncodeSegments(std::vector<Segment>{{text, false}}),
              c["ids_no_special"].get<Ids>());
    const auto pieces = *t->SplitText(text);
    EXPECT_EQ(std::vector<std::string>(pieces.begin(), pieces.end()),
              c["pieces"].get<std::vector<std::string>>());
    EXPECT_EQ(t->Decode(c["ids"].get<Ids>()), text);
  }
}

TEST_P(GoldenTokenizerTest, TablesAndSpecials) {
  const auto t = GoldenTokenizer(GetParam());
  EXPECT_EQ(t->vocab_size(), 768);
  EXPECT_THAT(t->eos_ids(), ElementsAre(514));
  EXPECT_TRUE(t->is_eos(514));
  EXPECT_FALSE(t->is_eos(513));
  EXPECT_FALSE(t->is_special(511));
  EXPECT_TRUE(t->is_special(512));
  EXPECT_TRUE(t->is_special(767));
  EXPECT_FALSE(t->is_special(768));
  EXPECT_FALSE(t->is_special(-1));
  EXPECT_EQ(t->SpecialId("[BOS]"), 512);
  EXPECT_EQ(t->SpecialId("<|reserved_token_600|>"), 600);
  EXPECT_EQ(t->TokenBytes(600), "<|reserved_token_600|>");
  EXPECT_EQ(t->SpecialId("<|nonsense|>"), std::nullopt);
  EXPECT_EQ(t->SpecialId("a"), std::nullopt);
  EXPECT_EQ(t->TokenBytes(768), "");
  EXPECT_EQ(t->TokenBytes(-1), "");
  EXPECT_EQ(t->TokenBytes(0), "!");
}

TEST_P(GoldenTokenizerTest, RoundTripOfRandomText) {
  const auto t = GoldenTokenizer(GetParam());
  std::mt19937_64 rng(7);
  for (int i = 0; i < 3000; ++i) {
    const std::string text = RandomText(rng, 120);
    ASSERT_EQ(t->Decode(*t->EncodeOrdinary(text)), text);
  }
}

TEST_P(GoldenTokenizerTest, SpecialNamesTypedByUsersStayOrdinary) {
  const auto t = GoldenTokenizer(GetParam());
  for (TokenId id = 512; id < 768; ++id) {
    const std::string name(t->TokenBytes(id));
    for (const std::string& text : {name, "a" + name + "b", name + name, " " + name}) {
      const Ids ids = *t->EncodeOrdinary(text);
      for (const TokenId got : ids) ASSERT_FALSE(t->is_special(got)) << text;
      ASSERT_EQ(t->Decode(ids), text);
    }
    EXPECT_THAT(*t->EncodeSegments(std::vector<Segment>{{name, true}}), ElementsAre(id));
  }
}

TEST(TokenizerTest, SegmentsAreEncodedOnTheirOwn) {
  const auto t = GoldenTokenizer("kimi_linear");
  Ids expected = *t->EncodeOrdinary("he");
  const Ids rest = *t->EncodeOrdinary("llo");
  expected.insert(expected.end(), rest.begin(), rest.end());
  expected.push_back(514);
  EXPECT_EQ(
      *t->EncodeSegments(std::vector<Segment>{{"he", false}, {"llo", false}, {"<|im_end|>", true}}),
      expected);
  EXPECT_TRUE(t->EncodeSegments({})->empty());
}

TEST(TokenizerTest, LongestSpecialNameWinsAtTheSamePlace) {
  BrokenCheckpoint c("kimi_linear");
  c.Edit("tokenizer_config.json", [](Json& v) {
    v["added_tokens_decoder"]["600"] = {{"content", "<x"}};
    v["added_tokens_decoder"]["601"] = {{"content", "<x>"}};
    v["added_tokens_decoder"]["602"] = {{"content", "x>"}};
  });
  const auto t = Tokenizer::Load(c.path());
  ASSERT_TRUE(t.ok()) << t.status();
  EXPECT_THAT(*(*t)->EncodeSegments(std::vector<Segment>{{"<x><x<x>x>", true}}),
              ElementsAre(601, 600, 601, 602));
}

TEST(TokenizerTest, InvalidUtf8NamesTheByte) {
  const auto t = GoldenTokenizer("kimi_linear");
  struct {
    std::string text;
    std::string words;
  } const cases[] = {{"ab\xff", "byte 2 (0xff)"},           {"\xc0\xaf", "byte 0 (0xc0)"},
                     {"é\xed\xa0\x80", "byte 2 (0xed)"},    {"中\xe4\xb8", "byte 3 (0xe4)"},
                     {"\xf4\x90\x80\x80", "byte 0 (0xf4)"}, {"x\x80", "byte 1 (0x80)"}};
  for (const auto& c : cases) {
    ExpectError(t->EncodeOrdinary(c.text).status(), absl::StatusCode::kInvalidArgument, {c.words});
    ExpectError(t->EncodeSegments(std::vector<Segment>{{"ok", false}, {c.text, false}}).status(),
                absl::StatusCode::kInvalidArgument, {"segment 1", c.words});
    ExpectError(t->SplitText(c.text).status(), absl::StatusCode::kInvalidArgument, {c.words});
  }
}

TEST(TokenizerTest, EosIdsFromEitherFile) {
  BrokenCheckpoint c("kimi_k3");
  c.Edit("generation_config.json", [](Json& v) { v["eos_token_id"] = {513, 521, 513}; });
  EXPECT_THAT((*Tokenizer::Load(c.path()))->eos_ids(), ElementsAre(513, 521));
  c.Edit("generation_config.json", [](Json& v) { v.erase("eos_token_id"); });
  EXPECT_THAT((*Tokenizer::Load(c.path()))->eos_ids(), ElementsAre(514));  // text_config's
  std::filesystem::remove(c.path() / "generation_config.json");
  EXPECT_THAT((*Tokenizer::Load(c.path()))->eos_ids(), ElementsAre(514));
  c.Edit("config.json", [](Json& v) { v["text_config"].erase("eos_token_id"); });
  ExpectError(Tokenizer::Load(c.path()).status(), absl::StatusCode::kInvalidArgument,
              {"config.json", "eos_token_id", "add"});
}

// Each entry breaks one thing; the error names the file and what is wrong.
TEST(TokenizerTest, LoadErrors) {
  struct {
    const char* what;
    std::function<void(BrokenCheckpoint&)> spoil;
    absl::StatusCode code;
    std::vector<std::string> words;
  } const cases[] = {
      {"no vocabulary",
       [](auto& c) { std::filesystem::remove(c.path() / "tiktoken.model"); },
       absl::StatusCode::kNotFound,
       {"tiktoken.model", "no such file"}},
      {"no names",
       [](auto& c) { std::filesystem::remove(c.path() / "tokenizer_config.json"); },
       absl::StatusCode::kNotFound,
       {"tokenizer_config.json", "no such file"}},
      {"no config",
       [](auto& c) { std::filesystem::remove(c.path() / "config.json"); },
       absl::StatusCode::kNotFound,
       {"config.json", "no such file"}},
      {"vocabulary is a folder",
       [](auto& c) {
         std::filesystem::remove(c.path() / "tiktoken.model");
         std::filesystem::create_directory(c.path() / "tiktoken.model");
       },
       absl::StatusCode::kInvalidArgument,
       {"tiktoken.model", "not a regular file"}},
      {"names are not JSON",
       [](auto& c) { WriteAll(c.path() / "tokenizer_config.json", "{"); },
       absl::StatusCode::kInvalidArgument,
       {"tokenizer_config.json", "not valid JSON"}},
      {"names are a list",
       [](auto& c) { WriteAll(c.path() / "tokenizer_config.json", "[]"); },
       absl::StatusCode::kInvalidArgument,
       {"tokenizer_config.json", "not an object"}},
      {"no added tokens",
       [](auto& c) {
         c.Edit("tokenizer_config.json", [](Json& v) { v.erase("added_tokens_decoder"); });
       },
       absl::StatusCode::kInvalidArgument,
       {"tokenizer_config.json", "added_tokens_decoder"}},
      {"added token below the reserved ids",
       [](auto& c) {
         c.Edit("tokenizer_config.json", [](Json& v) {
           v["added_tokens_decoder"]["511"] = {{"content", "x"}};
         });
       },
       absl::StatusCode::kInvalidArgument,
       {"\"511\"", "512 to 767"}},
      {"added token above the reserved ids",
       [](auto& c) {
         c.Edit("tokenizer_config.json", [](Json& v) {
           v["added_tokens_decoder"]["768"] = {{"content", "x"}};
         });
       },
       absl::StatusCode::kInvalidArgument,
       {"\"768\"", "512 to 767"}},
      {"added token with a word for an id",
       [](auto& c) {
         c.Edit("tokenizer_config.json", [](Json& v) {
           v["added_tokens_decoder"]["600x"] = {{"content", "x"}};
         });
       },
       absl::StatusCode::kInvalidArgument,
       {"\"600x\""}},
      {"added token without a name",
       [](auto& c) {
         c.Edit("tokenizer_config.json", [](Json& v) {
           v["added_tokens_decoder"]["600"] = {{"special", true}};
         });
       },
       absl::StatusCode::kInvalidArgument,
       {"added_tokens_decoder[\"600\"].content"}},
      {"added token that is a string",
       [](auto& c) {
         c.Edit("tokenizer_config.json", [](Json& v) { v["added_tokens_decoder"]["600"] = "x"; });
       },
       absl::StatusCode::kInvalidArgument,
       {"added_tokens_decoder[\"600\"].content"}},
      {"two tokens of one name",
       [](auto& c) {
         c.Edit("tokenizer_config.json", [](Json& v) {
           v["added_tokens_decoder"]["600"] = {{"content", "[BOS]"}};
         });
       },
       absl::StatusCode::kInvalidArgument,
       {"512 and 600", "[BOS]"}},
      {"model smaller than the vocabulary",
       [](auto& c) {
         c.Edit("config.json", [](Json& v) { v["text_config"]["vocab_size"] = 767; });
       },
       absl::StatusCode::kInvalidArgument,
       {"config.json", "vocab_size", "767", "768"}},
      {"eos outside",
       [](auto& c) { c.Edit("generation_config.json", [](Json& v) { v["eos_token_id"] = 768; }); },
       absl::StatusCode::kInvalidArgument,
       {"generation_config.json", "eos_token_id", "768"}},
      {"eos is a word",
       [](auto& c) {
         c.Edit("generation_config.json", [](Json& v) { v["eos_token_id"] = {514, "x"}; });
       },
       absl::StatusCode::kInvalidArgument,
       {"generation_config.json", "eos_token_id", "x"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    BrokenCheckpoint checkpoint("kimi_k3");
    ASSERT_TRUE(Tokenizer::Load(checkpoint.path()).ok());
    c.spoil(checkpoint);
    const absl::Status status = Tokenizer::Load(checkpoint.path()).status();
    ExpectError(status, c.code, {});
    for (const std::string& word : c.words) {
      EXPECT_NE(MessageOf(status).find(word), std::string::npos) << word << " in " << status;
    }
  }
}

TEST(TokenizerTest, PaddedModelVocabularyIsFine) {
  BrokenCheckpoint c("kimi_k3");
  c.Edit("config.json", [](Json& v) { v["text_config"]["vocab_size"] = 1024; });
  const auto t = Tokenizer::Load(c.path());
  ASSERT_TRUE(t.ok()) << t.status();
  EXPECT_EQ((*t)->vocab_size(), 768);
}

TEST(TokenizerTest, GiantInputsTakeBoundedTime) {
  const auto t = GoldenTokenizer("kimi_linear");
  const auto start = std::chrono::steady_clock::now();
  std::string letters;
  for (int64_t i = 0; i < 500'000; ++i) letters.push_back(static_cast<char>('a' + i * 7919 % 26));
  for (const std::string& text :
       {std::string(500'000, 'a'), letters, std::string(500'000, 'A'), std::string(500'000, ' '),
        std::string(500'000, '.'), std::string(500'000, '7'), std::string(500'000, '\n')}) {
    const auto ids = t->EncodeOrdinary(text);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(t->Decode(*ids), text);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 20.0);
  RecordProperty("seconds", std::to_string(took.count()));
}

}  // namespace
}  // namespace deltamesh
