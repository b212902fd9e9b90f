#include "services/simulate/chat_traffic.h"

#include <algorithm>

#include "runtime/base/status.h"
#include "services/simulate/content_path.h"
#include "services/simulate/sim_random.h"

namespace deltamesh {
namespace {

// Chosen, not measured: most are a question or two of a few sentences, answered at some length.
const Quantiles& TurnsOfChat() {
  static const Quantiles q({{0, 1}, {0.4, 1.9}, {0.7, 3.5}, {0.9, 8}, {1, 20}});
  return q;
}
const Quantiles& SystemTokens() {
  static const Quantiles q({{0, 80}, {0.5, 240}, {1, 900}});
  return q;
}
const Quantiles& QuestionTokens() {
  static const Quantiles q({{0, 8}, {0.5, 60}, {0.9, 400}, {0.99, 1500}, {1, 3000}});
  return q;
}
const Quantiles& AnswerTokens() {
  static const Quantiles q({{0, 10}, {0.5, 220}, {0.9, 600}, {1, 1500}});
  return q;
}
// From the end of an answer to the next question.
const Quantiles& ReadingSeconds() {
  static const Quantiles q({{0, 4}, {0.5, 25}, {0.9, 90}, {1, 300}});
  return q;
}

// Names of texts: what is shared by variant, what is a chat's own by a count.
constexpr uint64_t kSystemText = uint64_t{6} << 60, kOwnText = uint64_t{7} << 60;

}  // namespace

struct ChatTraffic::Chat {
  Chat(uint64_t seed, uint64_t number_of) : random(seed, number_of), number(number_of) {}

  SimRandom random;
  const uint64_t number;
  ContentPath text;
  int64_t turns_left = 0;
  uint64_t texts = 0;  // of its own, so far
  int64_t system_tokens = 0;

  void Add(double tokens) {
    text.Append(kOwnText | number << 16 | ++texts,
                std::max<int64_t>(1, static_cast<int64_t>(tokens)));
  }
  void Begin(int64_t variants) {
    const uint64_t variant = random.Below(static_cast<uint64_t>(variants));
    system_tokens = static_cast<int64_t>(SystemTokens().At(SimRandom(11, variant).Uniform()));
    text.Append(kSystemText | variant, system_tokens);
    turns_left = static_cast<int64_t>(TurnsOfChat().Draw(random));
  }
};

ChatTraffic::ChatTraffic(const ChatTrafficOptions& options) : options_(options) {
  CHECK(options.chats >= 0 && options.variants >= 1 && options.chats < 1 << 30);
  chats_.resize(static_cast<size_t>(options.chats));
  for (uint64_t i = 0; i < chats_.size(); ++i) {
    due_.emplace(SimRandom(options.seed, i << 1 | 1).Uniform() * options.seconds, i);
  }
}

ChatTraffic::~ChatTraffic() = default;

std::optional<double> ChatTraffic::NextAt() const {
  if (due_.empty()) return std::nullopt;
  return due_.top().first;
}

Turn ChatTraffic::Next() {
  const auto [at, number] = due_.top();
  due_.pop();
  std::unique_ptr<Chat>& chat = chats_[number];
  if (chat == nullptr) {
    chat = std::make_unique<Chat>(options_.seed, number << 1);
    chat->Begin(options_.variants);
  }
  Chat& c = *chat;
  c.Add(QuestionTokens().Draw(c.random));
  Turn turn;
  turn.at = at;
  turn.session = number + 1;
  turn.prompt_tokens = c.text.tokens();
  c.Add(AnswerTokens().Draw(c.random));
  --c.turns_left;
  turn.output_tokens = c.text.tokens() - turn.prompt_tokens;
  turn.answer_seconds = 2 + static_cast<double>(turn.output_tokens) * 0.02;
  turn.breakpoints = {c.system_tokens};
  turn.keys = &c.text.keys();
  turn.source = number;
  return turn;
}

void ChatTraffic::Finished(const Turn& turn, double now) {
  std::unique_ptr<Chat>& chat = chats_[turn.source];
  if (chat->turns_left <= 0) {
    chat.reset();
    return;
  }
  due_.emplace(now + ReadingSeconds().Draw(chat->random), turn.source);
}

}  // namespace deltamesh
