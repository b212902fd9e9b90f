// Traffic: names of texts behave as names of prefixes do, agents are those that were measured, traces are
// read as they are written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "runtime/base/status.h"
#include "services/simulate/agent_traffic.h"
#include "services/simulate/chat_traffic.h"
#include "services/simulate/content_path.h"
#include "services/simulate/document_traffic.h"
#include "services/simulate/mixed_traffic.h"
#include "services/simulate/sim_random.h"
#include "services/simulate/trace_traffic.h"

namespace deltamesh {
namespace {

using testing::HasSubstr;

// Twin: the tokens themselves, as (text, index). Two blocks have the same name when all tokens up to their
// ends are the same, and no other two have.
TEST(ContentPath, EqualsItsTokens) {
  using Token = std::pair<uint64_t, int64_t>;
  std::map<std::vector<Token>, PrefixKey> names;
  std::map<PrefixKey, std::vector<Token>> tokens_of;
  SimRandom random(5, 0);
  for (int round = 0; round < 60; ++round) {
    ContentPath path;
    std::vector<Token> tokens;
    for (int step = 0; step < 12; ++step) {
      if (random.Below(4) == 0) {
        const auto keep = static_cast<int64_t>(random.Below(tokens.size() + 1));
        path.Truncate(keep);
        tokens.resize(static_cast<size_t>(keep));
      } else {
        const uint64_t text = 1 + random.Below(3);
        const auto count = static_cast<int64_t>(random.Below(3) * 64 + random.Below(70));
        path.Append(text, count);
        for (int64_t i = 0; i < count; ++i) tokens.emplace_back(text, i);
      }
      ASSERT_EQ(path.tokens(), static_cast<int64_t>(tokens.size()));
      ASSERT_EQ(path.keys().size(), tokens.size() / 64);
      for (size_t b = 1; b <= path.keys().size(); ++b) {
        const std::vector<Token> prefix(tokens.begin(),
                                        tokens.begin() + static_cast<int64_t>(b * 64));
        const PrefixKey& key = path.keys()[b - 1];
        ASSERT_EQ(names.emplace(prefix, key).first->second, key);
        ASSERT_EQ(tokens_of.emplace(key, prefix).first->second, prefix);
      }
    }
  }
}

TEST(Quantiles, AreMetAndGrowBetween) {
  const Quantiles q({{0.1, 2}, {0.5, 8}, {0.9, 512}});
  EXPECT_EQ(q.At(0), 2);
  EXPECT_EQ(q.At(0.5), 8);
  EXPECT_NEAR(q.At(0.7), 64, 1e-9);
  EXPECT_EQ(q.At(1), 512);
}

// All turns, each answered after its own time.
std::vector<Turn> Drain(Traffic& traffic) {
  std::vector<Turn> turns;
  std::map<std::pair<double, size_t>, Turn> live;
  for (;;) {
    const auto next = traffic.NextAt();
    if (!live.empty() && (!next || live.begin()->first.first <= *next)) {
      const auto [key, turn] = *live.begin();
      live.erase(live.begin());
      traffic.Finished(turn, key.first);
      continue;
    }
    if (!next) return turns;
    Turn turn = traffic.Next();
    EXPECT_GE(turn.keys->size(), static_cast<size_t>(turn.answer_blocks()));
    live.emplace(std::pair(turn.at + turn.answer_seconds, turns.size()), turn);
    turns.push_back(turn);
  }
}

template <typename F>
double Median(const std::vector<Turn>& turns, F f) {
  std::vector<double> values;
  for (const Turn& turn : turns) values.push_back(static_cast<double>(f(turn)));
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

TEST(AgentTraffic, IsWhatWasMeasured) {
  AgentTraffic traffic({.seed = 3, .sessions = 300});
  const std::vector<Turn> turns = Drain(traffic);
  EXPECT_NEAR(static_cast<double>(turns.size()) / 300, 68.5, 9);
  EXPECT_NEAR(Median(turns, [](const Turn& t) { return t.output_tokens; }), 216, 12);
  EXPECT_NEAR(Median(turns, [](const Turn& t) { return t.prompt_tokens; }), 104644, 16000);
  double mean = 0;
  std::set<uint64_t> sessions;
  for (const Turn& t : turns) {
    mean += static_cast<double>(t.prompt_tokens) / static_cast<double>(turns.size());
    sessions.insert(t.session);
    EXPECT_LT(t.prompt_tokens + t.output_tokens, 1048576);
    EXPECT_LE(t.breakpoints[0], 16000 * 6 / 5);
  }
  EXPECT_NEAR(mean, 123600, 16000);
  EXPECT_EQ(sessions.size(), 300u);
  EXPECT_TRUE(std::is_sorted(turns.begin(), turns.end(),
                             [](const Turn& a, const Turn& b) { return a.at < b.at; }));
}

TEST(DocumentTraffic, PromptsShareBeginningsAndNotEnds) {
  DocumentTraffic traffic({.requests = 500, .documents = 50});
  std::map<PrefixKey, int> seen;
  int64_t blocks = 0, shared = 0, whole = 0, count = 0;
  while (traffic.NextAt()) {
    const Turn turn = traffic.Next();
    for (int64_t i = 0; i < turn.prompt_blocks(); ++i) {
      const int before = seen[(*turn.keys)[static_cast<size_t>(i)]]++;
      ++blocks;
      shared += before > 0;
      whole += before > 0 && i + 1 == turn.prompt_blocks();
    }
    ++count;
    traffic.Finished(turn, turn.at);
  }
  EXPECT_EQ(count, 500);
  EXPECT_GT(shared, blocks / 2);
  EXPECT_LT(whole, count / 2) << "ends are questions";
}

TEST(ChatTraffic, PromptsAreShortAndGrow) {
  ChatTraffic traffic({.seed = 3, .chats = 400});
  const std::vector<Turn> turns = Drain(traffic);
  EXPECT_GT(turns.size(), 800u);
  EXPECT_LT(turns.size(), 2400u);
  EXPECT_LT(Median(turns, [](const Turn& t) { return t.prompt_tokens; }), 2000);
  EXPECT_NEAR(Median(turns, [](const Turn& t) { return t.output_tokens; }), 220, 30);
  std::map<uint64_t, int64_t> grown;
  for (const Turn& t : turns)
    EXPECT_GT(t.prompt_tokens, std::exchange(grown[t.session], t.prompt_tokens));
  EXPECT_EQ(grown.size(), 400u);
}

TEST(DocumentTraffic, UniqueOnesShareOnlyTheCommonText) {
  DocumentTraffic traffic({.requests = 300, .unique = true});
  std::map<PrefixKey, int> seen;
  while (traffic.NextAt()) {
    const Turn turn = traffic.Next();
    for (size_t i = 0; i < turn.keys->size(); ++i)
      EXPECT_EQ(seen[(*turn.keys)[i]]++ > 0, i < 9 && seen.size() > 9) << i;
    traffic.Finished(turn, turn.at);
  }
}

// What each part would bring alone, merged by time.
TEST(MixedTraffic, IsItsParts) {
  const auto chats = [](uint64_t seed) {
    return std::make_unique<ChatTraffic>(ChatTrafficOptions{.seed = seed, .chats = 30});
  };
  std::vector<std::unique_ptr<Traffic>> parts;
  parts.push_back(chats(1));
  parts.push_back(std::make_unique<DocumentTraffic>(DocumentTrafficOptions{.requests = 40}));
  MixedTraffic mixed(std::move(parts));
  DocumentTraffic documents({.requests = 40});
  const auto a = chats(1);
  std::vector<std::pair<double, int64_t>> expected, got;
  for (const Turn& t : Drain(*a)) expected.emplace_back(t.at, t.prompt_tokens);
  for (const Turn& t : Drain(documents)) expected.emplace_back(t.at, t.prompt_tokens);
  std::set<uint64_t> sessions;
  for (const Turn& t : Drain(mixed)) {
    got.emplace_back(t.at, t.prompt_tokens);
    sessions.insert(t.session);
  }
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(got, expected);
  EXPECT_EQ(sessions.size(), 31u) << "those of chats, and none";
}

class TraceTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::vector<Turn>> Read(const std::string& text) {
    const std::string path = testing::TempDir() + "/trace.jsonl";
    std::ofstream(path) << text;
    absl::StatusOr<std::unique_ptr<TraceTraffic>> trace = TraceTraffic::Open(path);
    if (!trace.ok()) return trace.status();
    std::vector<Turn> turns;
    while ((*trace)->NextAt()) {
      turns.push_back((*trace)->Next());
      keys_.push_back(*turns.back().keys);
      (*trace)->Finished(turns.back(), 0);
    }
    if (!(*trace)->status().ok()) return (*trace)->status();
    return turns;
  }
  std::string Error(const std::string& text) { return MessageOf(Read(text).status()); }
  std::vector<std::vector<PrefixKey>> keys_;
};

TEST_F(TraceTest, ReadsMooncakesFormat) {
  const auto turns = Read(
      R"({"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]})"
      "\n"
      R"({"timestamp": 30535, "input_length": 1536, "output_length": 26, "hash_ids": [46, 47, 99]})"
      "\n\n");
  ASSERT_TRUE(turns.ok()) << turns.status();
  ASSERT_EQ(turns->size(), 2u);
  EXPECT_EQ((*turns)[0].at, 27.482);
  EXPECT_EQ((*turns)[0].prompt_tokens, 1100);
  EXPECT_EQ((*turns)[1].output_tokens, 26);
  EXPECT_EQ(keys_[0].size(), (1100u + 52) / 64);
  for (size_t i = 0; i < 18; ++i) EXPECT_EQ(keys_[0][i] == keys_[1][i], i < 16) << i;
}

// Requests as the published description shows them: 512 tokens a name, the last one's block in part.
TEST_F(TraceTest, ReadsThePublishedSamples) {
  const std::string common = "46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57";
  const auto turns =
      Read(R"({"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [)" +
           common + ", 2353, 2354]}\r\n" +
           R"({"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [)" +
           common + ", 2366]}\r\n \r\n" +
           R"({"timestamp": 30535.5, "input_length": 28, "output_length": 0, "hash_ids": [298]})");
  ASSERT_TRUE(turns.ok()) << turns.status();
  ASSERT_EQ(turns->size(), 3u);
  EXPECT_EQ((*turns)[0].at, 27.482);
  EXPECT_EQ((*turns)[0].prompt_tokens, 6955);
  EXPECT_EQ((*turns)[0].output_tokens, 52);
  EXPECT_EQ((*turns)[2].at, 30.5355);
  EXPECT_EQ((*turns)[2].output_tokens, 1) << "no answer is shorter";
  EXPECT_EQ(keys_[2].size(), 0u);
  const size_t shared = 12 * 512 / 64;
  for (size_t i = 0; i < keys_[1].size(); ++i)
    EXPECT_EQ(keys_[0][i] == keys_[1][i], i < shared) << i;
}

// The same last name under prompts of other lengths: equal as far as the shorter one reaches.
TEST_F(TraceTest, TheLastNameMayCoverLessThanABlock) {
  const auto turns =
      Read(R"({"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]})"
           "\n"
           R"({"timestamp": 0, "input_length": 850, "output_length": 26, "hash_ids": [46, 47]})"
           "\n"
           R"({"timestamp": 0, "input_length": 850, "output_length": 26, "hash_ids": [46]})");
  ASSERT_TRUE(turns.ok()) << turns.status();
  ASSERT_EQ(keys_[1].size(), 13u);
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(keys_[0][i], keys_[1][i]) << i;
  for (size_t i = 0; i < 13; ++i) EXPECT_EQ(keys_[1][i] == keys_[2][i], i < 8) << i;
}

TEST_F(TraceTest, OddLinesAreRefusedByNumber) {
  const std::string good =
      R"({"timestamp": 5, "input_length": 9, "output_length": 5, "hash_ids": [1]})"
      "\n";
  const std::pair<const char*, const char*> odd[] = {
      {"[5, 9, 5, [1]]", "is not a JSON object"},
      {R"({"timestamp": 6, "input_length": 9)", "not valid JSON"},
      {R"({"input_length": 9, "output_length": 5, "hash_ids": [1], "delay": 3})", "timestamp"},
      {R"({"timestamp": "6", "input_length": 9, "output_length": 5, "hash_ids": [1]})",
       "timestamp"},
      {R"({"timestamp": -6, "input_length": 9, "output_length": 5, "hash_ids": [1]})", "timestamp"},
      {R"({"timestamp": 6, "input_length": 0, "output_length": 5, "hash_ids": []})",
       "input_length"},
      {R"({"timestamp": 6, "input_length": 9.5, "output_length": 5, "hash_ids": [1]})",
       "input_length"},
      {R"({"timestamp": 6, "input_length": 9, "output_length": -1, "hash_ids": [1]})",
       "output_length"},
      {R"({"timestamp": 6, "input_length": 9, "hash_ids": [1]})", "output_length"},
      {R"({"timestamp": 6, "input_length": 9, "output_length": 5})", "hash_ids"},
      {R"({"timestamp": 6, "input_length": 9, "output_length": 5, "hash_ids": 1})", "hash_ids"},
      {R"({"timestamp": 6, "input_length": 9, "output_length": 5, "hash_ids": ["a"]})", "hash_ids"},
      {R"({"timestamp": 6, "input_length": 9, "output_length": 5, "hash_ids": [-1]})", "hash_ids"},
      {R"({"timestamp": 6, "input_length": 9, "output_length": 5, "hash_ids": [1, 2]})",
       "2 hash_ids for 9 tokens, which are 1 blocks of 512"},
      {R"({"timestamp": 6, "timestamp": 6, "input_length": 9, "output_length": 5, "hash_ids": [1]})",
       "occurs twice"},
      {R"({"timestamp": 4, "input_length": 9, "output_length": 5, "hash_ids": [1]})", "goes back"}};
  for (const auto& [line, why] : odd) {
    const std::string error = Error(good + "\n" + good + line + "\n" + good);
    EXPECT_THAT(error, HasSubstr("trace.jsonl:4: ")) << line;
    EXPECT_THAT(error, HasSubstr(why)) << line;
  }
}

TEST_F(TraceTest, ErrorsNameFileLineAndRemedy) {
  const auto line = [](int ms, int input) {
    return absl::StrFormat(
        R"({"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [1]})", ms, input);
  };
  EXPECT_THAT(Error(""), HasSubstr("has no requests"));
  EXPECT_THAT(Error("{}\n"), HasSubstr("trace.jsonl:1: timestamp"));
  EXPECT_THAT(Error("no\n"), HasSubstr("trace.jsonl:1"));
  EXPECT_THAT(Error(line(5, 1100)), HasSubstr("1 hash_ids for 1100 tokens"));
  EXPECT_THAT(Error(line(5, 9) + "\n" + line(4, 9)),
              HasSubstr("trace.jsonl:2: timestamp 4 goes back"));
  EXPECT_TRUE(absl::IsNotFound(TraceTraffic::Open("/none.jsonl").status()));
}

}  // namespace
}  // namespace deltamesh
