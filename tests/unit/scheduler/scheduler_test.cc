// Transcripts: every file of testdata is a list of commands ("> ...") with the output expected
// below each.
//   > options step=512 chunk=256 running=16      (first; starts a scheduler)
//   > add NAME prompt=END [from=POSITION] [prefill] [cut=POSITION]...   (cuts ascending)
//   > remove NAME
//   > plan [TIMES] [pass]                        (pass: one piece of each step may pass a cut)
// DELTAMESH_REWRITE=1 writes what came out into the files instead of comparing.
#include "runtime/scheduler/scheduler.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "runtime/base/random.h"

namespace deltamesh {
namespace {

class Transcript {
 public:
  // The output of one command.
  std::string Run(const std::string& line) {
    std::istringstream words(line);
    std::string command, word, name;
    words >> command;
    std::map<std::string, int64_t> values;
    std::vector<std::string> plain;
    std::vector<int64_t> cuts;
    while (words >> word) {
      const size_t eq = word.find('=');
      if (eq == std::string::npos) {
        plain.push_back(word);
      } else if (word.starts_with("cut=")) {
        cuts.push_back(std::stoll(word.substr(eq + 1)));
      } else {
        values[word.substr(0, eq)] = std::stoll(word.substr(eq + 1));
      }
    }
    if (command == "options") {
      scheduler_ = std::make_unique<Scheduler>(
          SchedulerOptions{values.at("step"), values.at("chunk"), values.at("running")});
      return "";
    }
    if (command == "add") {
      const bool prefill = plain.size() > 1 && plain[1] == "prefill";
      const SequenceId id{names_.size() + 1};
      names_[id] = plain.at(0);
      positions_[id] = values["from"];
      scheduler_->Add(id, values["from"], values.at("prompt"), !prefill, cuts);
      return "";
    }
    if (command == "remove") {
      for (const auto& [id, n] : names_) {
        if (n == plain.at(0)) scheduler_->Remove(id);
      }
      return "";
    }
    if (command == "plan") {
      std::string out;
      const bool pass = !plain.empty() && plain.back() == "pass";
      if (pass) plain.pop_back();
      for (int64_t i = 0; i < (plain.empty() ? 1 : std::stoll(plain[0])); ++i) out += Plan(pass);
      return out;
    }
    return "unknown command\n";
  }

 private:
  std::string Plan(bool pass) {
    std::ostringstream out;
    int64_t tokens = 0;
    for (const PlannedChunk& c : scheduler_->Plan(pass)) {
      int64_t& position = positions_[c.id];
      out << names_[c.id] << " " << position << "..";
      if (c.cut > 0) out << position + c.cut << "..";
      out << position + c.tokens << "  ";
      position += c.tokens;
      tokens += c.tokens;
    }
    out << "| " << tokens << " tokens, " << scheduler_->running() << " running, "
        << scheduler_->waiting() << " waiting, " << scheduler_->waiting_tokens() << " to come\n";
    return out.str();
  }

  std::unique_ptr<Scheduler> scheduler_;
  std::map<SequenceId, std::string> names_;
  std::map<SequenceId, int64_t> positions_;
};

TEST(Scheduler, Transcripts) {
  const std::string folder = DELTAMESH_SOURCE_DIR "/tests/unit/scheduler/testdata";
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path().filename().string());
    std::ifstream in(entry.path());
    std::ostringstream all;
    all << in.rdbuf();
    std::istringstream lines(all.str());
    std::string line, got;
    Transcript transcript;
    while (std::getline(lines, line)) {
      if (line.starts_with("> ")) {
        got += line + "\n" + transcript.Run(line.substr(2));
      } else if (line.empty() || line.starts_with("#")) {
        got += line + "\n";
      }
    }
    if (std::getenv("DELTAMESH_REWRITE") != nullptr) {
      std::ofstream(entry.path()) << got;
    } else {
      EXPECT_EQ(got, all.str());
    }
    ++files;
  }
  EXPECT_GE(files, 4);
}

// Random arrivals, lengths and removals: the bounds hold in every step, and everyone gets ahead.
TEST(Scheduler, InvariantsUnderRandomLoad) {
  struct Known {
    int64_t position, end;
    bool generates;
    int64_t decode_left;
    int64_t idle_steps = 0;
  };
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SeededEntropy entropy(seed);
    const auto below = [&](uint64_t n) { return static_cast<int64_t>(entropy.Next() % n); };
    const SchedulerOptions options = {1 + below(seed % 3 == 0 ? 8 : 300), 1 + below(200),
                                      1 + below(9)};
    Scheduler scheduler(options);
    std::map<SequenceId, Known> known;
    uint64_t next = 1;
    int64_t added = 0;
    for (int step = 0; step < 20000 && (added < 40 || !known.empty()); ++step) {
      if (added < 40 && below(3) == 0) {
        const int64_t position = below(4) == 0 ? 64 * below(3) : 0;
        const Known k = {position, position + 1 + below(700), below(4) != 0, 1 + below(30)};
        scheduler.Add({next}, k.position, k.end, k.generates);
        known[{next++}] = k;
        ++added;
      }
      const int64_t waiting_before = scheduler.waiting_tokens();
      const auto plan = scheduler.Plan();
      int64_t tokens = 0, prompt_tokens = 0;
      std::map<SequenceId, int> seen;
      bool prompts_began = false;
      for (auto& [id, k] : known) ++k.idle_steps;
      for (const PlannedChunk& c : plan) {
        ASSERT_EQ(++seen[c.id], 1);
        Known& k = known.at(c.id);
        ASSERT_GE(c.tokens, 1);
        tokens += c.tokens;
        k.idle_steps = 0;
        if (k.position < k.end) {
          prompts_began = true;
          prompt_tokens += c.tokens;
          ASSERT_LE(c.tokens, options.chunk_tokens_max);
          ASSERT_LE(k.position + c.tokens, k.end);
          const int64_t stop = k.position + c.tokens;
          // Off the grid only at the end, or where the grid could not be reached.
          if (stop < k.end && stop % 64 != 0) {
            ASSERT_EQ(stop / 64, k.position / 64);
          }
        } else {
          ASSERT_FALSE(prompts_began) << "decoding comes first";
          ASSERT_TRUE(k.generates);
          ASSERT_EQ(c.tokens, 1);
          --k.decode_left;
        }
        k.position += c.tokens;
      }
      ASSERT_LE(tokens, options.step_tokens_max);
      ASSERT_LE(static_cast<int64_t>(plan.size()), options.running_max);
      ASSERT_LE(scheduler.running(), options.running_max);
      ASSERT_EQ(scheduler.waiting_tokens(), waiting_before - prompt_tokens);
      // Work is never refused while there is budget and somebody to use it.
      if (scheduler.running() > 0) {
        ASSERT_GT(tokens, 0);
      }
      for (auto it = known.begin(); it != known.end();) {
        const Known& k = it->second;
        const bool done = k.position >= k.end && (!k.generates || k.decode_left <= 0);
        // Nobody starves, not even with one token a step and a queue in front.
        ASSERT_LE(k.idle_steps, 6000) << "seed " << seed << " sequence " << it->first.value;
        if (done || below(400) == 0) {
          scheduler.Remove(it->first);
          it = known.erase(it);
        } else {
          ++it;
        }
      }
    }
    ASSERT_TRUE(known.empty()) << "seed " << seed << ": not everyone finished";
    ASSERT_FALSE(scheduler.HasWork());
    ASSERT_EQ(scheduler.waiting_tokens(), 0);
  }
}

// As many decode as the seats allow, each with a token of a step that has no more of them than seats.
TEST(Scheduler, PromptsGetAheadBesideAllThatDecode) {
  for (const int64_t seats : {1, 2, 5, 16}) {
    Scheduler scheduler({.step_tokens_max = seats, .chunk_tokens_max = 64, .running_max = seats});
    uint64_t next = 1;
    for (int64_t i = 1; i < seats; ++i) scheduler.Add({next++}, 0, 1, true);
    scheduler.Plan();  // their prompts
    const SequenceId prompt{next};
    scheduler.Add(prompt, 0, 50, true);
    for (int step = 0; step < 50; ++step) {
      int64_t tokens = 0;
      for (const PlannedChunk& c : scheduler.Plan()) tokens += c.id == prompt ? c.tokens : 0;
      ASSERT_GT(tokens, 0) << seats << " seats, step " << step;
    }
  }
}

// All seats are taken by long prompts: a short one gets its first tokens once one of them had a chunk, and
// the long ones get ahead however many short ones come.
TEST(Scheduler, ShortPromptsDoNotWaitForLongOnesAndLongOnesAreNotStarved) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SeededEntropy entropy(seed);
    const auto below = [&](uint64_t n) { return static_cast<int64_t>(entropy.Next() % n); };
    const int64_t seats = 1 + below(6), chunk = 64 * (1 + below(6)), step = 64 * seats + below(400);
    Scheduler scheduler({step, chunk, seats});
    constexpr int64_t kLong = 100'000;
    uint64_t next = 1;
    for (int64_t i = 0; i < seats; ++i) scheduler.Add({next++}, 0, kLong, false);
    const int64_t wait_max = chunk / 64 + 2;  // each seated prompt gets at least 64 tokens a step
    int64_t long_tokens = 0, shorts = 0;
    for (int round = 0; round < 50; ++round) {
      const SequenceId id{next++};
      scheduler.Add(id, 0, 1 + below(200), false);
      bool begun = false, ended = false;
      for (int64_t waited = 0; !ended; ++waited) {
        bool served = false;
        for (const PlannedChunk& c : scheduler.Plan()) {
          served |= c.id == id;
          if (c.id != id) long_tokens += c.tokens;
        }
        begun |= served;
        if (!begun) {
          ASSERT_LE(waited, wait_max) << "seed " << seed;
        }
        ended = begun && scheduler.waiting() + scheduler.running() == seats;
      }
      scheduler.Remove(id);
      ++shorts;
    }
    EXPECT_GE(long_tokens, shorts * 64) << "seed " << seed;
  }
}

}  // namespace
}  // namespace deltamesh
