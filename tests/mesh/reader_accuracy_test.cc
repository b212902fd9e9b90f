// What the shipped model reads, through a mesh: whole answers that are exactly right, by the length of the
// text. The questions are about held-out words (tools/train/questions.py); the counts are the same on every
// machine.
#include <gtest/gtest.h>

#include <fstream>

#include "nlohmann/json.hpp"
#include "runtime/base/log.h"
#include "runtime/text/chat.h"
#include "runtime/text/tokenizer.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {
namespace {

struct Length {
  int64_t tokens;
  int right;   // the answers are the same bits everywhere
  int unsaid;  // right ones to the questions that the text does not answer
};
constexpr Length kLengths[] = {{512, 79, 18}, {2048, 69, 14}, {8192, 72, 18}, {32768, 33, 4}};
constexpr int64_t kAnswerTokensMax = 48;

std::string Reader() { return std::string(DELTAMESH_SOURCE_DIR) + "/models/reader"; }

TestMeshOptions Options() {
  TestMeshOptions options;
  options.folder = Reader();
  options.cache_bytes = int64_t{256} << 20;
  options.engine = {.slabs = 12,
                    .latent_blocks = 1200,
                    .step_tokens_max = 1024,
                    .chunk_tokens_max = 1024,
                    .running_max = 8,
                    .context_tokens_max = 33'000};
  return options;
}

class ReaderAccuracyTest : public ::testing::TestWithParam<Length> {
 protected:
  void SetUp() override {
    InitLog("test", LogLevel::kError);
    tokenizer_ = *Tokenizer::Load(Reader());
    format_ = *ChatFormat::Load(Reader(), *tokenizer_);
    std::ifstream in(std::string(DELTAMESH_SOURCE_DIR) + "/tests/data/reader/texts.json");
    texts_ = nlohmann::json::parse(in);
    mesh_ = std::make_unique<TestMesh>(Options());
    mesh_->Start();
  }

  static ChatRequest Chat(const nlohmann::json& text, const std::string& question) {
    ChatRequest chat;
    chat.messages = *ChatMessagesFromJson(text["messages"]);
    chat.messages.push_back(
        {.role = "user", .content = text["before"].get<std::string>() + question});
    chat.thinking = false;
    return chat;
  }

  ClientRequest RequestOf(const ChatRequest& chat) {
    ClientRequest request;
    request.request_id = absl::StrFormat("question-%d", ++requests_);
    request.prompt = *tokenizer_->EncodeSegments(*format_->Render(chat));
    request.max_tokens = kAnswerTokensMax;
    request.sampling.set_top_p(1.0f);
    request.sampling.set_repetition_penalty(1.0f);
    request.stop_token_ids = tokenizer_->eos_ids();
    return request;
  }

  std::string Said(const ChatRequest& chat, const Answer& answer) const {
    const std::unique_ptr<AnswerParser> parser = format_->NewParser(chat);
    std::string said = parser->Push(answer.tokens).content;
    return said + parser->Finish().content;
  }

  // Right answers to such questions about one text: the first alone, then the others at once, which find
  // the text in a cache.
  int RightAbout(const nlohmann::json& text, const char* which) {
    const auto& questions = text[which];
    int right = 0;
    for (size_t begin = 0, end = 1; begin < questions.size(); begin = end, end = questions.size()) {
      std::vector<ChatRequest> chats;
      std::vector<RequestId> ids;
      for (size_t i = begin; i < end; ++i) {
        chats.push_back(Chat(text, questions[i]["question"].get<std::string>()));
        const ClientRequest request = RequestOf(chats.back());
        ids.push_back(request.request_id);
        CHECK_OK(mesh_->Submit(request));
      }
      EXPECT_TRUE(mesh_->RunUntilEnded(ids, absl::Minutes(5)));
      for (size_t i = 0; i < ids.size(); ++i) {
        const Answer& answer = mesh_->answer(ids[i]);
        EXPECT_TRUE(answer.status.ok()) << answer.status;
        right +=
            Said(chats[i], answer) == questions[begin + i]["answer"].get<std::string>() ? 1 : 0;
        cached_ += answer.usage.cached_tokens;
      }
    }
    return right;
  }

  std::unique_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<const ChatFormat> format_;
  nlohmann::json texts_;
  std::unique_ptr<TestMesh> mesh_;
  int64_t cached_ = 0;
  int requests_ = 0;
};

TEST_P(ReaderAccuracyTest, AnswersHeldOutQuestions) {
  int right = 0, asked = 0, unsaid = 0, unanswered = 0;
  for (const auto& text : texts_) {
    if (text["length"].get<int64_t>() != GetParam().tokens) continue;
    right += RightAbout(text, "questions");
    asked += static_cast<int>(text["questions"].size());
    unsaid += RightAbout(text, "unanswered");
    unanswered += static_cast<int>(text["unanswered"].size());
  }
  RecordProperty("right", right);
  RecordProperty("asked", asked);
  RecordProperty("unsaid", unsaid);
  EXPECT_GE(asked, 30);
  EXPECT_EQ(right, GetParam().right) << "of " << asked;
  EXPECT_GE(unanswered, 10);
  EXPECT_EQ(unsaid, GetParam().unsaid) << "of " << unanswered;
  EXPECT_GT(cached_, 0);
  EXPECT_TRUE(mesh_->RunUntil([&] { return mesh_->AtBaseline(); }, absl::Seconds(5)));
}

INSTANTIATE_TEST_SUITE_P(Lengths, ReaderAccuracyTest, ::testing::ValuesIn(kLengths),
                         [](const auto& info) { return std::to_string(info.param.tokens); });

}  // namespace
}  // namespace deltamesh::testing
