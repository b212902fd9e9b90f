// The chunks of a stream, byte for byte: what is made once for all tokens must be what each would have got.
#include "services/router/openai_reply.h"

#include <gtest/gtest.h>

namespace deltamesh {
namespace {

constexpr const char* kTexts[] = {"a",
                                  "b",
                                  "",
                                  "quote\"d",
                                  "back\\slash",
                                  "\n\t\x01\x1f",
                                  "\xe6\xb7\xb1",
                                  "stray \xff byte",
                                  "</script>"};

std::string Quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

class OpenAiReplyTest : public ::testing::TestWithParam<bool> {};

TEST_P(OpenAiReplyTest, EveryTextHasTheSameFrame) {
  const bool chat = GetParam();
  for (const bool usage : {false, true}) {
    ReplyWriter writer({.id = "a\"text\":\"id",
                        .model = "content",
                        .created = 7,
                        .chat = chat,
                        .logprobs = false,
                        .include_usage = usage},
                       nullptr);
    bool role = chat;
    for (const char* text : kTexts) {
      AnswerEvent event;
      event.text = text;
      std::vector<std::string> chunks = writer.Chunks(event);
      if (role) chunks.erase(chunks.begin());
      role = false;
      if (event.text.empty()) {
        EXPECT_TRUE(chunks.empty());
        continue;
      }
      const std::string delta =
          chat ? "\"delta\":{\"content\":" + Quoted(text) + "}" : "\"text\":" + Quoted(text);
      const std::string object = chat ? "chat.completion.chunk" : "text_completion";
      ASSERT_EQ(chunks.size(), 1u);
      EXPECT_EQ(chunks[0], "{\"id\":\"a\\\"text\\\":\\\"id\",\"object\":\"" + object +
                               "\",\"created\":7,\"model\":\"content\",\"choices\":[{\"index\":0," +
                               delta + ",\"logprobs\":null,\"finish_reason\":null}]" +
                               (usage ? ",\"usage\":null}" : "}"));
    }
  }
}

TEST_P(OpenAiReplyTest, WhatIsNoTextAloneHasAFrameOfItsOwn) {
  ReplyWriter writer({.id = "i", .model = "m", .created = 7, .chat = GetParam()}, nullptr);
  AnswerEvent both;
  both.text = "t";
  both.reasoning = "r";
  const std::string last = writer.Chunks(both).back();
  const Json delta = Json::parse(last)["choices"][0];
  if (GetParam()) {
    EXPECT_EQ(delta["delta"].dump(), "{\"reasoning_content\":\"r\",\"content\":\"t\"}");
  } else {
    EXPECT_EQ(delta["text"], "t");
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, OpenAiReplyTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Chat" : "Completion"; });

}  // namespace
}  // namespace deltamesh
