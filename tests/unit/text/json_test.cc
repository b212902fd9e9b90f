#include "runtime/text/json.h"

#include "runtime/text/utf8.h"
#include "tests/unit/text/text_test_util.h"

namespace deltamesh {
namespace {

TEST(JsonTest, FloatsPrintAsInPython) {
  const std::pair<double, const char*> cases[] = {
      {0.0, "0.0"},
      {-0.0, "-0.0"},
      {1.0, "1.0"},
      {-2.5, "-2.5"},
      {0.1, "0.1"},
      {1e15, "1000000000000000.0"},
      {1e16, "1e+16"},
      {1.5e16, "1.5e+16"},
      {123456789012345680.0, "1.2345678901234568e+17"},
      {9999999999999998.0, "9999999999999998.0"},
      {0.0001, "0.0001"},
      {0.00012, "0.00012"},
      {1e-5, "1e-05"},
      {1.25e-7, "1.25e-07"},
      {1e100, "1e+100"},
      {5e-324, "5e-324"},
      {1.7976931348623157e308, "1.7976931348623157e+308"},
      {100.0, "100.0"},
      {123.456, "123.456"}};
  for (const auto& [value, want] : cases) EXPECT_EQ(PythonJson(value), want);
}

TEST(JsonTest, Separators) {
  const Json v = Json::parse(R"({"b": [1, {"d": null, "c": true}], "a": "é\n\u0001\u007f\"\\"})");
  EXPECT_EQ(PythonJson(v),
            "{\"b\": [1, {\"d\": null, \"c\": true}], \"a\": \"é\\n\\u0001\x7f\\\"\\\\\"}");
  EXPECT_EQ(CompactJson(v),
            "{\"b\":[1,{\"d\":null,\"c\":true}],\"a\":\"é\\n\\u0001\x7f\\\"\\\\\"}");
  EXPECT_EQ(SortedCompactJson(v),
            "{\"a\":\"é\\n\\u0001\x7f\\\"\\\\\",\"b\":[1,{\"c\":true,\"d\":null}]}");
  EXPECT_EQ(PythonJson(Json::parse("[[], {}, 18446744073709551615, -9223372036854775808]")),
            "[[], {}, 18446744073709551615, -9223372036854775808]");
}

TEST(JsonTest, DepthIsBounded) {
  const std::string deep(kMaxJsonDepth, '[');
  EXPECT_TRUE(ParseJson(deep + std::string(kMaxJsonDepth, ']'), "x").ok());
  ExpectError(ParseJson("[" + deep + std::string(kMaxJsonDepth + 1, ']'), "x").status(),
              absl::StatusCode::kInvalidArgument, {"x: ", "129 deep", "128"});
  EXPECT_TRUE(ParseJson("\"" + deep + deep + "\\\"[\"", "x").ok());
  EXPECT_FALSE(ParseJson(std::string(10'000'000, '['), "x").ok());
  ExpectError(ParseJson("{\"a\": \xff}", "tools").status(), absl::StatusCode::kInvalidArgument,
              {"tools: "});
}

// Two bytes of text may take a hundred of memory.
TEST(JsonTest, ValuesAreBounded) {
  const auto many = [](int64_t count, std::string_view value) {
    std::string text = "[0";
    for (int64_t i = 1; i < count; ++i) text.append(",").append(value);
    return text + "]";
  };
  EXPECT_TRUE(ParseJson(many(kMaxJsonContainers, "{}"), "x").ok());
  ExpectError(ParseJson(many(kMaxJsonContainers + 1, "{}"), "body").status(),
              absl::StatusCode::kInvalidArgument, {"body: ", "262145 objects", "262144"});
  EXPECT_TRUE(ParseJson(many(kMaxJsonValues, "1"), "x").ok());
  ExpectError(ParseJson(many(kMaxJsonValues + 2, "1"), "body").status(),
              absl::StatusCode::kInvalidArgument, {"body: ", "4194305 values", "4194304"});
  EXPECT_TRUE(ParseJson("\"" + std::string(kMaxJsonValues + 2, ',') + "\"", "x").ok());
}

// What is wrong is quoted in terminals, logs and answers.
TEST(JsonTest, ErrorsAreShortAndWellFormedWhateverTheText) {
  for (const std::string& text :
       {std::string("{\"a\": \xff\xfe}"), std::string("\xc3"),
        "[" + std::string(100'000, '9') + "]", "\"" + std::string(100'000, 'x') + "\x01\""}) {
    const absl::Status status = ParseJson(text, "body").status();
    ExpectError(status, absl::StatusCode::kInvalidArgument, {"body: not valid JSON"});
    EXPECT_FALSE(FirstInvalidUtf8(MessageOf(status)));
    EXPECT_LT(MessageOf(status).size(), 400u);
  }
}

TEST(JsonTest, ErrorsSayInOurWordsWhereAndWhatIsWrong) {
  const struct {
    std::string text, fault;
  } cases[] = {
      {"", "it ends at byte 0, before its value does"},
      {R"({"a": [1, )", "it ends at byte 10, before its value does"},
      {R"({"a": "b)", "it ends at byte 8, before its value does"},
      {"{a: 1}", "what ends with 'a' at byte 1 does not belong there"},
      {"[1] 2", "what ends with '2' at byte 4 does not belong there"},
      {R"(["a" "longer"])", "what ends with '\"' at byte 12 does not belong there"},
      {"[1,]", "what ends with ']' at byte 3 does not belong there"},
      {R"(["\x"])", "what ends with 'x' at byte 3 does not belong there"},
      {"[\"a\nb\"]",
       "the byte 0x0a at byte 3 does not belong there; within a string it is written as"},
      {"{\"a\": \xff}", "the byte 0xff at byte 6 does not belong there"},
      {"[1e999, 2]", "the number that ends before byte 6 is too large for a double"},
  };
  for (const auto& c : cases) {
    const absl::Status status = ParseJson(c.text, "body").status();
    ExpectError(status, absl::StatusCode::kInvalidArgument,
                {"body: not valid JSON: " + c.fault, "; correct it"});
    EXPECT_EQ(MessageOf(status).find("exception"), std::string::npos) << MessageOf(status);
  }
}

std::string ObjectOf(int64_t keys) {
  std::string text = "{";
  for (int64_t i = 0; i < keys; ++i) {
    text += absl::StrFormat("%s\"k:{%d\":%d", i == 0 ? "" : ",", i, i);
  }
  return text + "}";
}

TEST(JsonTest, KeysOfAnObjectAreBounded) {
  const absl::StatusOr<Json> most = ParseJson(ObjectOf(kMaxJsonObjectKeys), "x");
  ASSERT_TRUE(most.ok()) << most.status();
  EXPECT_EQ(static_cast<int64_t>(most->size()), kMaxJsonObjectKeys);
  ExpectError(ParseJson(ObjectOf(kMaxJsonObjectKeys + 1), "body").status(),
              absl::StatusCode::kInvalidArgument, {"body: ", "16384"});
  // Several together cost as much, wherever they lie; many small ones cost nothing.
  const std::string half = ObjectOf(kMaxJsonObjectKeys / 2);
  EXPECT_TRUE(ParseJson("[" + half + ",{\"a\":" + half + "}]", "x").ok());
  const std::string four = half + "," + half + "," + half + "," + half;
  EXPECT_TRUE(ParseJson("[" + four + "]", "x").ok());
  EXPECT_FALSE(ParseJson("[" + four + "," + half + "]", "x").ok());
  std::string small = "[{}";
  for (int i = 0; i < 100'000; ++i) small += R"(,{"role":"user","content":"a"})";
  EXPECT_TRUE(ParseJson(small + "]", "x").ok());
}

}  // namespace
}  // namespace deltamesh
