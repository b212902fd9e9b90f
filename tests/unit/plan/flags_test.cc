// Numbers on the command line of `plan` and `simulate`: odd ones are refused by name with the range, and
// whatever is let through gives finite figures or an error.
#include "services/common/flag_range.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "CLI/CLI.hpp"
#include "runtime/base/status.h"
#include "services/cli/plan.h"
#include "services/cli/simulate.h"

namespace deltamesh {
namespace {

using nlohmann::json;
using testing::AnyOf;
using testing::HasSubstr;
using testing::StartsWith;

// Of few tensors, so that it is read quickly.
const std::string kConfig =
    std::string(DELTAMESH_SOURCE_DIR) + "/tests/unit/model/configs/kimi_linear_48b.json";

struct Answer {
  std::string refused;  // by the parser
  absl::Status status;
  std::string out;
};

template <typename Options>
Answer Ask(void (*add)(CLI::App*, Options*),
           const std::function<absl::Status(const Options&, std::ostream&)>& run,
           std::vector<std::string> args) {
  CLI::App app;
  Options options;
  add(&app, &options);
  Answer answer;
  std::reverse(args.begin(), args.end());  // as CLI11 takes them
  try {
    app.parse(args);
  } catch (const CLI::ParseError& error) {
    answer.refused = error.what();
    return answer;
  }
  std::ostringstream out;
  answer.status = run(options, out);
  answer.out = out.str();
  return answer;
}

Answer Plan(const std::vector<std::string>& args) {
  return Ask<PlanOptions>(AddPlanFlags, RunPlan, args);
}
Answer Simulate(const std::vector<std::string>& args) {
  return Ask<SimulateOptions>(
      AddSimulateFlags,
      [](const SimulateOptions& options, std::ostream& out) {
        std::ostringstream log;
        return RunSimulate(options, out, log);
      },
      args);
}

template <typename Options>
std::vector<std::string> NumberFlags(void (*add)(CLI::App*, Options*), const std::string& type) {
  CLI::App app;
  Options options;
  add(&app, &options);
  std::vector<std::string> flags;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_type_name().starts_with(type)) flags.push_back(option->get_name());
  }
  return flags;
}

const char* const kOdd[] = {"nan",    "-nan", "inf",   "-inf", "1e300", "-1",     "1e400",
                            "-1e300", "ten",  "1e999", "",     "0x",    "-0.001", "1,5"};

void RefusesOdd(const std::vector<std::string>& flags,
                Answer (*ask)(const std::vector<std::string>&)) {
  for (const std::string& flag : flags) {
    for (const std::string odd : kOdd) {
      const Answer answer = ask({flag + "=" + odd});
      EXPECT_THAT(answer.refused, StartsWith(flag + ": ")) << odd;
      if (odd.empty()) continue;
      EXPECT_THAT(answer.refused, HasSubstr("\"" + odd + "\" is ")) << flag;
      EXPECT_THAT(answer.refused, HasSubstr("; use ")) << flag << odd;
      EXPECT_LT(answer.refused.size(), 200u) << answer.refused;
    }
  }
}

TEST(Flags, EveryNumberHasARange) {
  const auto plan = NumberFlags<PlanOptions>(AddPlanFlags, "FLOAT");
  EXPECT_THAT(plan, testing::IsSupersetOf({"--memory", "--requests", "--utilisation"}));
  RefusesOdd(plan, Plan);
  const auto simulate = NumberFlags<SimulateOptions>(AddSimulateFlags, "FLOAT");
  EXPECT_THAT(simulate, testing::IsSupersetOf({"--cache", "--hours", "--scale", "--link"}));
  RefusesOdd(simulate, Simulate);
  for (const auto& [flags, ask] :
       {std::pair(NumberFlags<PlanOptions>(AddPlanFlags, "INT"), &Plan),
        std::pair(NumberFlags<SimulateOptions>(AddSimulateFlags, "INT"), &Simulate)}) {
    EXPECT_GT(flags.size(), 4u);
    for (const std::string& flag : flags) {
      for (const char* odd :
           {"-1", "99999999999999999999", "1e3", "1.5", "x", "9223372036854775807"}) {
        EXPECT_THAT(ask({flag + "=" + odd}).refused, StartsWith(flag + ": ")) << odd;
      }
    }
  }
}

TEST(Flags, MessagesNameValueRangeAndUnit) {
  EXPECT_EQ(Plan({"--requests=1e300"}).refused,
            "--requests: \"1e300\" is out of range; use 0 to 1,000,000,000 requests per second");
  EXPECT_EQ(Plan({"--memory=nan"}).refused,
            "--memory: \"nan\" is no number; use 0 to 1,000,000 GB");
  EXPECT_EQ(
      Plan({"--prefill-rate=1e-300"}).refused,
      "--prefill-rate: \"1e-300\" is out of range; use 0.001 to 1,000,000,000 tokens per second");
  EXPECT_EQ(Plan({"--window=0"}).refused,
            "--window: \"0\" is out of range; use 1 to 1,000,000,000 tokens");
  EXPECT_EQ(Plan({"--window=1.5"}).refused,
            "--window: \"1.5\" is no whole number; use 1 to 1,000,000,000 tokens");
}

// Numbers that the document shows: finite, and no negative one but memory that is short.
void CheckFigures(const json& value, const std::string& at) {
  if (value.is_structured()) {
    for (const auto& [key, inner] : value.items()) CheckFigures(inner, at + "." + key);
  } else if (value.is_number() && !at.ends_with(".for_sequences") &&
             !at.ends_with(".below_bound")) {
    EXPECT_TRUE(std::isfinite(value.get<double>())) << at;
    EXPECT_GE(value.get<double>(), 0) << at;
  }
}

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed) {}

  std::string Of(const std::vector<std::string>& values) {
    return values[random_() % values.size()];
  }
  // Mostly of a usual size, at times the least or the most.
  std::string Number(double low, double high) {
    if (random_() % 4 == 0) return absl::StrFormat("%.17g", random_() % 2 == 0 ? low : high);
    const double from = std::log(std::max(low, 1e-12)), to = std::log(high);
    const double share = static_cast<double>(random_() % 1000) / 999;
    return absl::StrFormat("%.17g",
                           std::min(high, std::max(low, std::exp(from + (to - from) * share))));
  }
  std::string Whole(int64_t low, int64_t high) {
    const double value = std::stod(Number(static_cast<double>(low), static_cast<double>(high)));
    return std::to_string(std::clamp(static_cast<int64_t>(value), low, high));
  }

 private:
  std::mt19937_64 random_;
};

TEST(Flags, WhateverPlanLetsThroughIsCounted) {
  int answered = 0, refused = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Fuzz f(seed);
    std::vector<std::string> args = {kConfig,
                                     "--json",
                                     "--latents",
                                     f.Of({"f32", "bf16", "fp8"}),
                                     "--lengths",
                                     f.Whole(1, 1000000000),
                                     "--append-tokens",
                                     f.Whole(0, 1000000000),
                                     "--compare-tokens",
                                     f.Whole(1, 1000000000),
                                     "--kv-heads",
                                     f.Whole(1, 65536),
                                     "--window",
                                     f.Whole(1, 1000000000),
                                     "--memory",
                                     f.Of({"400", "1e6", f.Number(0, 1e6)}),
                                     "--link",
                                     f.Number(1e-3, 1e5),
                                     "--expert-shards",
                                     f.Whole(0, 1000000),
                                     "--expert-tflops",
                                     f.Number(0, 1e6),
                                     "--expert-read",
                                     f.Number(0, 1e6),
                                     "--requests",
                                     f.Number(0, 1e9),
                                     "--input-tokens",
                                     f.Whole(1, 1000000),
                                     "--uncached-tokens",
                                     f.Whole(1, 1000),
                                     "--output-tokens",
                                     f.Whole(1, 1000000),
                                     "--prefill-rate",
                                     f.Number(1e-3, 1e9),
                                     "--decode-rate",
                                     f.Number(1e-3, 1e9),
                                     "--stream-rate",
                                     f.Number(1e-3, 1e9),
                                     "--step-tokens",
                                     f.Whole(1, 1000000000),
                                     "--utilisation",
                                     f.Number(0.01, 1),
                                     "--router-request-ms",
                                     f.Number(0, 1e6),
                                     "--router-prompt-us",
                                     f.Number(0, 1e6),
                                     "--router-answer-us",
                                     f.Number(0, 1e6),
                                     "--router-live-requests",
                                     f.Whole(1, 1000000000)};
    const Answer answer = Plan(args);
    ASSERT_EQ(answer.refused, "") << seed;
    if (!answer.status.ok()) {
      ++refused;
      EXPECT_THAT(MessageOf(answer.status), AnyOf(StartsWith("memory: "), StartsWith("requests: "),
                                                  StartsWith("uncached-tokens: ")));
      continue;
    }
    ++answered;
    const json document = json::parse(answer.out);
    CheckFigures(document, "");
    if (document.contains("fleet")) {
      for (const auto& [role, part] : document["fleet"].items()) {
        if (!part.is_object()) continue;
        EXPECT_GE(part["workers"].get<int64_t>(), 1) << seed << role;
        EXPECT_LE(part["workers"].get<int64_t>(), 1000000000) << seed << role;
      }
    }
  }
  EXPECT_GT(answered, 15);
  EXPECT_GT(refused, 15);
}

TEST(Flags, WhateverSimulateLetsThroughIsCounted) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Fuzz f(seed);
    const Answer answer = Simulate({"--json",
                                    "--traffic",
                                    f.Of({"agents", "documents", "chats"}),
                                    "--sessions",
                                    "2",
                                    "--requests",
                                    "9",
                                    "--chats",
                                    "9",
                                    "--policy",
                                    "bound,ours",
                                    "--hours",
                                    f.Number(1e-3, 8784),
                                    "--cache",
                                    f.Number(0, 1e9),
                                    "--prefill-workers",
                                    f.Of({"0", "1"}),
                                    "--decode-workers",
                                    "1",
                                    "--sequences",
                                    f.Whole(1, 1024),
                                    "--prompt-rate",
                                    f.Number(100, 1e9),
                                    "--step-ms",
                                    f.Number(1e-3, 1e4),
                                    "--token-ms",
                                    f.Number(0, 1e3),
                                    "--link",
                                    f.Number(1e-3, 1e5)});
    ASSERT_EQ(answer.refused, "") << seed;
    ASSERT_TRUE(answer.status.ok()) << seed << answer.status;
    CheckFigures(json::parse(answer.out), "");
  }
}

}  // namespace
}  // namespace deltamesh
