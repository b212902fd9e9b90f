#include "services/simulate/agent_traffic.h"

#include <algorithm>

#include "runtime/base/status.h"
#include "services/simulate/content_path.h"
#include "services/simulate/sim_random.h"

namespace deltamesh {
namespace {

// Quantiles as measured; the ends, which were not, are guessed.
const Quantiles& TurnsOfSession() {
  static const Quantiles q({{0, 1},
                            {0.05, 4},
                            {0.10, 7},
                            {0.25, 18},
                            {0.50, 45},
                            {0.75, 94},
                            {0.90, 155},
                            {0.95, 232},
                            {0.99, 330},
                            {1, 400}});
  return q;
}
const Quantiles& FirstInput() {
  static const Quantiles q({{0, 11000},
                            {0.05, 13048},
                            {0.10, 15446},
                            {0.25, 18587},
                            {0.50, 24386},
                            {0.75, 104189},
                            {0.90, 258855},
                            {0.95, 378386},
                            {0.99, 716145}});
  return q;
}
// Tokens that are new after the longest prefix shared with the session's last prompt. The largest of those
// seen come from compaction, which is drawn apart, so appended ones stop where it begins to rule.
const Quantiles& NewTokens() {
  static const Quantiles q({{0, 64},
                            {0.05, 189},
                            {0.10, 230},
                            {0.25, 372},
                            {0.50, 705},
                            {0.75, 1674},
                            {0.90, 4077},
                            {0.95, 7988},
                            {0.99, 65875}});
  return q;
}
const Quantiles& OutputTokens() {
  static const Quantiles q({{0, 20},
                            {0.05, 89},
                            {0.10, 105},
                            {0.25, 137},
                            {0.50, 216},
                            {0.75, 429},
                            {0.90, 899},
                            {0.95, 1544},
                            {0.99, 3663},
                            {1, 8192}});
  return q;
}
const Quantiles& AnswerSeconds() {
  static const Quantiles q({{0, 1},
                            {0.10, 2.6},
                            {0.25, 3.9},
                            {0.50, 5.7},
                            {0.75, 9.6},
                            {0.90, 17.4},
                            {0.95, 26.8},
                            {0.99, 58.7},
                            {1, 120}});
  return q;
}
// From the end of an answer to the next prompt.
const Quantiles& GapSeconds() {
  static const Quantiles q({{0, 1},
                            {0.05, 3},
                            {0.10, 4},
                            {0.25, 6},
                            {0.52, 10},
                            {0.78, 30},
                            {0.85, 60},
                            {0.90, 120},
                            {0.95, 300},
                            {0.966, 480},
                            {0.98, 900},
                            {0.995, 3600},
                            {1, 14400}});
  return q;
}

constexpr double kAppendsBelow = 0.973;  // of turns, appends and not divergences
constexpr double kCutsTail = 0.0076, kCompacts = 0.0187;
// Not measured, chosen so that prompts are as long as those seen and plain policies reach what they reached
// on them: most agents compact at 200k tokens, and of sessions that begin large half are as rare among long
// ones as they are large.
constexpr double kNarrowShare = 0.8, kTiedShare = 0.5;
constexpr int64_t kNarrowTokens = 200000;
constexpr int64_t kToolsTokens = 12262, kSystemTokens = 2771;
constexpr double kKeptShare[] = {0.05, 0.08, 0.11, 0.20, 0.41};
constexpr double kCompactedTokens[] = {17000, 29000, 73000, 112000, 217000};

// Names of texts: what is shared by variant, what is a session's own by a count.
constexpr uint64_t kToolsText = uint64_t{1} << 60, kSystemText = uint64_t{2} << 60;

}  // namespace

struct AgentTraffic::Session {
  Session(uint64_t seed, uint64_t number_of) : random(seed, number_of), number(number_of) {}

  SimRandom random;
  const uint64_t number;
  ContentPath text;
  int64_t turns_left = 0;
  uint64_t texts = 0;  // of its own, so far
  int64_t prompt_tokens = 0;
  int64_t tools_tokens = 0, system_tokens = 0;
  int64_t window = 0;  // tokens beyond which it compacts

  void Add(double tokens) {
    text.Append(number << 24 | ++texts, std::max<int64_t>(1, static_cast<int64_t>(tokens)));
  }
  void Begin(int64_t variants, int64_t context_tokens) {
    const uint64_t variant = random.Below(static_cast<uint64_t>(variants));
    // Every variant has sizes of its own around the median.
    const double scale =
        0.8 + 0.4 * (static_cast<double>(variant) + 0.5) / static_cast<double>(variants);
    tools_tokens = static_cast<int64_t>(kToolsTokens * scale);
    system_tokens = static_cast<int64_t>(kSystemTokens * scale);
    text.Append(kToolsText | variant, tools_tokens);
    text.Append(kSystemText | variant, system_tokens);
    const double size = random.Uniform(), length = random.Uniform();
    const bool tied = random.Uniform() < kTiedShare;
    turns_left = static_cast<int64_t>(TurnsOfSession().At(tied ? 1 - size : length));
    Add(std::max(FirstInput().At(size) - static_cast<double>(text.tokens()), 64.0));
    const bool narrow = text.tokens() < kNarrowTokens && random.Uniform() < kNarrowShare;
    window = narrow ? std::min(kNarrowTokens, context_tokens) : context_tokens;
  }
  void Compact() {
    const uint64_t how = random.Below(std::size(kKeptShare));
    const auto kept = static_cast<int64_t>(static_cast<double>(prompt_tokens) * kKeptShare[how]);
    text.Truncate(std::max<int64_t>(1, kept));
    Add(kCompactedTokens[random.Below(std::size(kCompactedTokens))]);
  }
  // The next prompt, from the last one and its answer.
  void Continue() {
    const double what = random.Uniform();
    if (what < kCutsTail) {
      text.Truncate(
          std::max<int64_t>(1, prompt_tokens - 128 - static_cast<int64_t>(random.Below(65))));
      Add(NewTokens().At(random.Uniform() * kAppendsBelow));
    } else if (what < kCutsTail + kCompacts) {
      Compact();
    } else {
      Add(NewTokens().At(random.Uniform() * kAppendsBelow));
    }
    if (text.tokens() > window) Compact();
  }
};

AgentTraffic::AgentTraffic(const AgentTrafficOptions& options) : options_(options) {
  CHECK(options.sessions >= 0 && options.variants >= 1 && options.sessions < 1 << 30);
  sessions_.resize(static_cast<size_t>(options.sessions));
  for (uint64_t i = 0; i < sessions_.size(); ++i) {
    const double begin = SimRandom(options.seed, i << 1 | 1).Uniform() * options.day_seconds;
    due_.emplace(begin, i);
  }
}

AgentTraffic::~AgentTraffic() = default;

std::optional<double> AgentTraffic::NextAt() const {
  if (due_.empty()) return std::nullopt;
  return due_.top().first;
}

Turn AgentTraffic::Next() {
  const auto [at, number] = due_.top();
  due_.pop();
  std::unique_ptr<Session>& session = sessions_[number];
  // The largest answer has room too.
  const int64_t context = options_.context_tokens - 16384;
  if (session == nullptr) {
    session = std::make_unique<Session>(options_.seed, number << 1);
    session->Begin(options_.variants, context);
  } else {
    session->Continue();
  }
  Session& s = *session;
  s.prompt_tokens = s.text.tokens();
  const double output = OutputTokens().Draw(s.random);
  s.Add(output);
  --s.turns_left;
  Turn turn;
  turn.at = at;
  turn.session = number + 1;
  turn.prompt_tokens = s.prompt_tokens;
  turn.output_tokens = s.text.tokens() - s.prompt_tokens;
  turn.answer_seconds = AnswerSeconds().Draw(s.random);
  turn.breakpoints = {s.tools_tokens + s.system_tokens};
  turn.keys = &s.text.keys();
  turn.source = number;
  return turn;
}

void AgentTraffic::Finished(const Turn& turn, double now) {
  std::unique_ptr<Session>& session = sessions_[turn.source];
  if (session->turns_left <= 0) {
    session.reset();
    return;
  }
  due_.emplace(now + GapSeconds().Draw(session->random), turn.source);
}

}  // namespace deltamesh
