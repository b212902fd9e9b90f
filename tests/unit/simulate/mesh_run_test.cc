// A mesh of virtual workers: times by hand where one request is alone, conservation where many are not.
#include "services/simulate/mesh_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/common/quantities.h"
#include "services/simulate/agent_traffic.h"
#include "services/simulate/cache_run.h"
#include "services/simulate/disaggregation.h"
#include "services/simulate/latency.h"
#include "services/simulate/report.h"
#include "services/simulate/simulation.h"
#include "services/simulate/trace_traffic.h"

namespace deltamesh {
namespace {

constexpr int64_t kSnapshot = 449372160, kBlock = 27648 * 64;

class MeshRunTest : public ::testing::Test {
 protected:
  MeshRunTest() {
    InitLog("simulate", LogLevel::kError);
    options_.policy = *PolicyNamed("ours");
    options_.cache = {.bytes_max = int64_t{1} << 60, .block = kBlock, .snapshot = kSnapshot};
    options_.rates = {
        .prompt_tokens_per_second = 10000, .step_seconds = 0.01, .token_seconds = 0.001};
  }
  MeshRunResult Trace(const std::string& lines) {
    const std::string path = testing::TempDir() + "/mesh.jsonl";
    std::ofstream(path) << lines;
    auto traffic = TraceTraffic::Open(path);
    CHECK_OK(traffic.status());
    const auto result = RunMesh(**traffic, options_);
    CHECK_OK(result.status());
    return *result;
  }
  MeshRunResult Agents(int64_t sessions, uint64_t seed = 1) {
    AgentTraffic traffic({.seed = seed, .sessions = sessions, .day_seconds = 3600});
    const auto result = RunMesh(traffic, options_);
    CHECK_OK(result.status());
    return *result;
  }
  MeshRunOptions options_;
};

TEST_F(MeshRunTest, OneRequestTakesTheTimeThatItsPartsTake) {
  options_.prefill_workers = options_.decode_workers = 1;
  const MeshRunResult r =
      Trace(R"({"timestamp": 1000, "input_length": 8200, "output_length": 11,)"
            R"( "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]})");
  EXPECT_EQ(r.requests, 1);
  EXPECT_EQ(r.failed, 0);
  EXPECT_EQ(r.placed_prefill, 1);
  EXPECT_EQ(r.moved_bytes, kSnapshot + 128 * kBlock);
  EXPECT_EQ(r.computed_tokens, 8200);
  EXPECT_EQ(r.restored_tokens, 0);
  // A step of 8192 tokens; the latents leave meanwhile, then the state; a step of the 8 that are left.
  const double expected =
      (0.01 + 0.8192) + (100e-6 + static_cast<double>(kSnapshot) / 50e9) + (0.01 + 0.0008);
  EXPECT_NEAR(r.first_token.mean(), expected, 1e-9);
  EXPECT_NEAR(r.first_token.Percentile(0.5), expected, 0.02 * expected);
  // Ten more tokens, a step each.
  EXPECT_NEAR(r.last_second, 1 + expected + 10 * 0.011, 0.3);
  EXPECT_NEAR(r.prefill_busy * r.last_second, 0.8292, 1e-9);
  EXPECT_NEAR(r.decode_busy * r.last_second, 0.0108 + 10 * 0.011, 1e-9);
}

TEST_F(MeshRunTest, HandsOverAlwaysOrNeverWhenAsked) {
  options_.prefill_workers = options_.decode_workers = 2;
  options_.disaggregation = Disaggregation::kNever;
  const MeshRunResult never = Agents(4);
  EXPECT_EQ(never.handoffs, 0);
  EXPECT_GT(never.placed_append, 0);
  EXPECT_EQ(never.prefill_busy, 0);
  options_.disaggregation = Disaggregation::kAlways;
  const MeshRunResult always = Agents(4);
  EXPECT_EQ(always.placed_append + always.placed_alone, 0) << "no prompt of an agent fits a block";
  EXPECT_EQ(always.handoffs, always.requests);
  for (const MeshRunResult& r : {never, always}) {
    EXPECT_EQ(r.failed, 0);
    EXPECT_EQ(r.completion.count(), r.requests);
    EXPECT_GT(r.completion.mean(), r.first_token.mean());
    EXPECT_GE(r.token_gap.Percentile(0.01), 0.011 * 0.99) << "a step of one sequence";
  }
}

// Every request once, by hand: the answer's ten gaps are steps of one sequence.
TEST_F(MeshRunTest, CompletionIsFirstTokenAndGaps) {
  options_.prefill_workers = options_.decode_workers = 1;
  const MeshRunResult r =
      Trace(R"({"timestamp": 0, "input_length": 50, "output_length": 11, "hash_ids": [1]})");
  EXPECT_EQ(r.handoffs, 0);
  EXPECT_NEAR(r.first_token.mean(), 0.015, 1e-9);
  EXPECT_NEAR(r.token_gap.mean(), 0.011, 1e-9);
  EXPECT_NEAR(r.completion.mean(), 0.015 + 0.11, 1e-9);
}

TEST(Disaggregation, ComparesTheSameTraffic) {
  InitLog("simulate", LogLevel::kError);
  DisaggregationOptions options;
  options.base.prefill_workers = options.base.decode_workers = 2;
  options.scale = 0.01;
  const auto document = CompareDisaggregation(options, nullptr);
  ASSERT_TRUE(document.ok()) << document.status();
  ASSERT_EQ((*document)["cases"].size(), 12u);
  for (const auto& c : (*document)["cases"]) {
    const auto& rows = c["rows"];
    ASSERT_EQ(rows.size(), 3u);
    for (const auto& row : rows) {
      EXPECT_EQ(row["failed"], 0);
      EXPECT_EQ(row["requests"], rows[0]["requests"]);
    }
    EXPECT_EQ(rows[2]["handoffs"], 0);
    EXPECT_EQ(rows[1]["placed_append"], 0);
    const double ratio = rows[0]["ttft_mean"].get<double>() / rows[2]["ttft_mean"].get<double>();
    EXPECT_DOUBLE_EQ(c["planned"]["to_never"]["ttft_mean"].get<double>(), ratio);
  }
  EXPECT_EQ(document->dump(), CompareDisaggregation(options, nullptr)->dump());
  options.base.prefill_workers = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(CompareDisaggregation(options, nullptr).status()));
}

TEST_F(MeshRunTest, WithoutPrefillWorkersDecodeWorkersDoAll) {
  options_.prefill_workers = 0;
  options_.decode_workers = 1;
  const auto line = [](int ms) {
    return absl::StrFormat(
        R"({"timestamp": %d, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]})", ms);
  };
  const MeshRunResult r = Trace(line(0) + "\n" + line(5000));
  EXPECT_EQ(r.handoffs, 0);
  EXPECT_EQ(r.placed_alone, 1);
  EXPECT_EQ(r.placed_append, 1);
  EXPECT_EQ(r.restored_tokens, 960) << "the same prompt again: all but the last block";
  EXPECT_EQ(r.computed_tokens, 1024 + 64);
}

// The worker that holds the session is taken, and the other one, with a slab free, fetches from it.
TEST_F(MeshRunTest, AStateIsFetchedFromABusyWorker) {
  options_.prefill_workers = 0;
  options_.decode_workers = 2;
  options_.slabs = 1;
  std::string ids;
  for (int i = 0; i < 16; ++i) ids += absl::StrFormat("%s%d", i == 0 ? "" : ", ", i);
  const auto line = [&](int ms, int answer) {
    return absl::StrFormat(
        R"({"timestamp": %d, "input_length": 8192, "output_length": %d, "hash_ids": [%s]})", ms,
        answer, ids);
  };
  // The second one finds the first one's worker streaming.
  const MeshRunResult r = Trace(line(0, 2000) + "\n" + line(5000, 2));
  EXPECT_EQ(r.failed, 0);
  EXPECT_EQ(r.placed_alone, 1);
  EXPECT_EQ(r.placed_fetch, 1);
  EXPECT_EQ(r.fetches, 1);
  EXPECT_EQ(r.moved_bytes, kSnapshot + 127 * kBlock);
  EXPECT_EQ(r.restored_tokens, 127 * 64);
  EXPECT_EQ(r.computed_tokens, 8192 + 64);
}

TEST_F(MeshRunTest, EveryTokenIsRestoredOrComputed) {
  options_.prefill_workers = 3;
  options_.decode_workers = 4;
  options_.cache.bytes_max = int64_t{25} << 30;
  const MeshRunResult r = Agents(12);
  EXPECT_GT(r.requests, 300);
  EXPECT_EQ(r.failed, 0);
  EXPECT_GT(r.evicted, 0);
  EXPECT_GT(r.hit_rate(), 0.8);
  EXPECT_EQ(r.placed_prefill, r.handoffs);
  EXPECT_EQ(r.placed_prefill + r.placed_append + r.placed_fetch + r.placed_alone,
            r.requests + r.retries);
  // What one worker restored another may have computed again only when a prompt was moved between them.
  EXPECT_GE(r.computed_tokens + r.restored_tokens, r.prompt_tokens);
  EXPECT_EQ(r.first_token.count(), r.requests);
}

// The mesh has no more than one cache of everything has, and not much less while memory is plenty.
TEST_F(MeshRunTest, IsNearOneCacheForAll) {
  options_.prefill_workers = 2;
  options_.decode_workers = 4;
  AgentTraffic traffic({.seed = 1, .sessions = 12, .day_seconds = 3600});
  const auto one = RunCache(traffic, options_.policy, options_.cache);
  ASSERT_TRUE(one.ok());
  const MeshRunResult mesh = Agents(12);
  EXPECT_EQ(mesh.prompt_tokens, one->prompt_tokens);
  EXPECT_LE(mesh.hit_rate(), one->hit_rate() + 0.002);
  EXPECT_GT(mesh.hit_rate(), one->hit_rate() - 0.03);
}

TEST_F(MeshRunTest, TheSameSeedGivesTheSameReport) {
  SimulationOptions options;
  options.sessions = 8;
  options.hours = 1;
  options.prefill_workers = 2;
  options.decode_workers = 3;
  options.policies = {"bound", "ours", "tail"};
  const auto run = [&] {
    const auto document = Simulate(options, nullptr);
    CHECK_OK(document.status());
    return document->dump();
  };
  const std::string first = run();
  EXPECT_EQ(first, run());
  options.seed = 2;
  EXPECT_NE(first, run());
}

TEST_F(MeshRunTest, FailuresAreCountedByReasonAndNothingHasNoPercentile) {
  options_.prefill_workers = options_.decode_workers = 1;
  const auto line = [](int64_t tokens) {
    return absl::StrFormat(
        "{\"timestamp\": 0, \"input_length\": %d, \"output_length\": 10, \"hash_ids\": [%s]}\n",
        tokens, [&] {
          std::string ids;
          for (int64_t i = 0; i < tokens / 512; ++i)
            ids += (i > 0 ? "," : "") + std::to_string(i + tokens);
          return ids;
        }());
  };
  const MeshRunResult none = Trace(line(1500000) + line(1600000));
  EXPECT_EQ(none.failed, 2);
  ASSERT_EQ(none.failures.size(), 1u);
  const MeshFailures& failures = none.failures.at(absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(failures.requests, 2);
  EXPECT_THAT(failures.first, testing::HasSubstr("prompt: 1500000 tokens"));
  const auto row = MeshRow("ours", "planned", none, 0.5);
  EXPECT_TRUE(row["hit_rate"].is_null());
  EXPECT_FALSE(row.contains("below_bound"));
  for (const char* times : {"ttft_seconds", "token_gap_seconds", "completion_seconds"}) {
    for (const auto& [name, value] : row[times].items())
      EXPECT_TRUE(value.is_null()) << times << name;
  }
  EXPECT_EQ(row["failures"][0]["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(row["failures"][0]["requests"], 2);
  std::ostringstream text;
  PrintMeshRows(nlohmann::ordered_json::array({row}), text);
  EXPECT_THAT(text.str(),
              testing::HasSubstr("ours: 2 failed, INVALID_ARGUMENT, first r0: prompt: 1500000"));
  EXPECT_THAT(text.str(), testing::Not(testing::HasSubstr("0 us ")));

  const MeshRunResult some = Trace(line(1500000) + line(8192));
  EXPECT_EQ(some.failed, 1);
  EXPECT_GT(MeshRow("ours", "planned", some, {})["ttft_seconds"]["p50"].get<double>(), 0);
}

TEST_F(MeshRunTest, SnapshotBytesArePartOfTheCachesBytes) {
  options_.prefill_workers = options_.decode_workers = 2;
  const MeshRunResult r = Agents(6);
  EXPECT_GT(r.snapshots_peak, 0);
  EXPECT_EQ(r.snapshot_bytes_peak, r.snapshots_peak * kSnapshot);
  EXPECT_LT(r.snapshot_bytes_peak, r.cache_bytes_peak);
  const auto row = MeshRow("ours", "planned", r, {});
  EXPECT_EQ(row["snapshot_bytes_peak"].get<int64_t>(), r.snapshot_bytes_peak);
  std::ostringstream text;
  PrintMeshRows(nlohmann::ordered_json::array({row}), text);
  EXPECT_THAT(text.str(),
              testing::HasSubstr(DecimalBytes(static_cast<double>(r.snapshot_bytes_peak))));
}

TEST(Latency, PercentilesAreWithinTwoPercent) {
  Latency latency;
  for (int i = 1; i <= 1000; ++i) latency.Add(i * 0.01);
  EXPECT_NEAR(latency.Percentile(0.5), 5, 0.11);
  EXPECT_NEAR(latency.Percentile(0.99), 9.9, 0.21);
  EXPECT_NEAR(latency.mean(), 5.005, 1e-9);
  EXPECT_EQ(Latency().Percentile(0.5), 0);
}

}  // namespace
}  // namespace deltamesh
