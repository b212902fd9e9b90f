#include "services/cli/bench_fetch.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "runtime/base/status.h"
#include "services/cli/bench_process.h"
#include "services/cli/bench_rows.h"
#include "services/cli/bench_turns.h"
#include "services/cli/local_mesh.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kLongest = absl::Minutes(15);  // for one request
constexpr absl::Duration kReadyMax = absl::Minutes(5);
constexpr absl::Duration kTold =
    absl::Milliseconds(700);  // what a turn left behind reaches both routers
constexpr int64_t kAnswerTokens = 8, kWarmTokens = 200;
constexpr int kComputedMost = 3;  // repetitions of what takes the longest
// Sequences of BenchTokens: no two prompts alike.
constexpr uint64_t kContextSequence = 3, kWarmSequence = 3000, kAppendSequence = 4000;

class FetchBench {
 public:
  explicit FetchBench(const FetchBenchOptions& options) : o_(options) {}

  absl::Status Run();
  FetchRuns runs;

 private:
  absl::Status StartMesh();
  absl::Status StartPrefill();
  std::vector<std::string> WorkerFlags() const;
  std::vector<TokenId> More(int64_t tokens) {
    return BenchPrompt(kAppendSequence + next_++, tokens, here_->vocab());
  }
  // Another prompt, through both routers' connections and the workers' memory.
  absl::Status Warm();
  struct Seen {
    SeenTurn turn;
    v1::RequestExplanation why;
  };
  absl::StatusOr<Seen> AskFetching(const std::vector<TokenId>& prompt);
  absl::Status Turn(int repetition);

  const FetchBenchOptions& o_;
  std::vector<TokenId> context_;
  std::unique_ptr<BenchProcess> handing_over_, prefill_;  // a router and its prefill worker
  std::unique_ptr<LocalMesh> mesh_;                       // the other one, and the decode worker
  std::unique_ptr<TurnClient> here_, there_;  // that computes there, and that hands over
  uint64_t next_ = 0;
};

std::vector<std::string> FetchBench::WorkerFlags() const {
  const int64_t context = o_.context + 4 * o_.append + 2048;
  const int64_t blocks = context / kBlockTokens;
  const int64_t state = o_.layout.slab_bytes() + blocks * o_.layout.block_bytes();
  return {absl::StrFormat("--context-tokens=%d", context),
          absl::StrFormat("--cache-mib=%d", std::max<int64_t>(512, 4 * state >> 20)),
          absl::StrFormat("--latent-blocks=%d", 8 * blocks)};
}

absl::Status FetchBench::StartMesh() {
  ASSIGN_OR_RETURN(
      handing_over_,
      BenchProcess::Start("router",
                          {"router", "--model=" + o_.model, "--listen=127.0.0.1:0",
                           "--http=127.0.0.1:0", "--model-name=bench", "--disaggregate=always"},
                          kReadyMax));
  LocalMeshOptions o;
  o.model = o_.model;
  o.threads = o_.threads;
  o.experts = 0;
  o.weights = o_.weights;
  o.activations = o_.activations;
  o.packed_dir = o_.packed_dir;
  o.flags = {"--prefill=0", "--worker-flag=--router=" + handing_over_->grpc()};
  for (const std::string& flag : WorkerFlags()) o.flags.push_back("--worker-flag=" + flag);
  ASSIGN_OR_RETURN(mesh_, LocalMesh::Start(o));
  RETURN_IF_ERROR(handing_over_->AwaitServing());
  here_ = std::make_unique<TurnClient>(mesh_->router(), kLongest);
  there_ = std::make_unique<TurnClient>(handing_over_->grpc(), kLongest);
  RETURN_IF_ERROR(here_->Open());
  return there_->Open();
}

absl::Status FetchBench::StartPrefill() {
  prefill_.reset();
  std::vector<std::string> args = {"prefill",
                                   "--model=" + o_.model,
                                   "--router=" + handing_over_->grpc(),
                                   "--name=prefill-0",
                                   "--listen=127.0.0.1:0",
                                   "--http=127.0.0.1:0",
                                   "--transport-listen=127.0.0.1:0",
                                   "--threads=" + std::to_string(o_.threads),
                                   "--weights=" + o_.weights,
                                   "--activations=" + o_.activations,
                                   "--packed-dir=" + o_.packed_dir,
                                   "--drain-seconds=1",
                                   "--local-experts"};
  for (const std::string& flag : WorkerFlags()) args.push_back(flag);
  ASSIGN_OR_RETURN(prefill_, BenchProcess::Start("prefill", std::move(args), kReadyMax));
  RETURN_IF_ERROR(prefill_->AwaitServing());
  for (int i = 0; i < 2; ++i) RETURN_IF_ERROR(Warm());
  return absl::OkStatus();
}

absl::Status FetchBench::Warm() {
  const auto prompt = BenchPrompt(kWarmSequence + next_++, kWarmTokens, here_->vocab());
  return there_->Ask(prompt, kAnswerTokens).status();
}

absl::StatusOr<FetchBench::Seen> FetchBench::AskFetching(const std::vector<TokenId>& prompt) {
  absl::SleepFor(kTold);
  Seen seen;
  ASSIGN_OR_RETURN(seen.turn, there_->Ask(prompt, kAnswerTokens));
  ASSIGN_OR_RETURN(seen.why, there_->Explain(seen.turn.request_id));
  return seen;
}

absl::Status FetchBench::Turn(int repetition) {
  RETURN_IF_ERROR(StartPrefill());
  std::vector<TokenId> prompt = context_;
  const auto append = [&] {
    const std::vector<TokenId> more = More(o_.append);
    prompt.insert(prompt.end(), more.begin(), more.end());
  };
  append();
  ASSIGN_OR_RETURN(const Seen all, AskFetching(prompt));
  const bool counts = repetition >= 0;
  if (counts && all.why.fetched_tokens() > 0) {
    runs.all_bytes = static_cast<int64_t>(all.why.fetched_bytes());
    runs.all_seconds.push_back(all.why.fetch_seconds());
    runs.all_rate.push_back(static_cast<double>(runs.all_bytes) / all.why.fetch_seconds() / 1e9);
    runs.fetched_first.push_back(all.turn.first_token);
  }
  if (counts && repetition < kComputedMost) {
    ASSIGN_OR_RETURN(const SeenTurn computed, there_->Ask(prompt, kAnswerTokens, /*cached=*/false));
    if (computed.answer != all.turn.answer) {
      return Internal("a turn's answer is another one when all of it is computed");
    }
    runs.computed_first.push_back(computed.first_token);
  }
  append();  // a turn that the decode worker computes, and one that begins with it
  RETURN_IF_ERROR(here_->Ask(prompt, kAnswerTokens).status());
  append();
  ASSIGN_OR_RETURN(const Seen added, AskFetching(prompt));
  if (counts && added.why.fetched_tokens() > 0) {
    runs.new_bytes = static_cast<int64_t>(added.why.fetched_bytes());
    runs.new_seconds.push_back(added.why.fetch_seconds());
    runs.new_rate.push_back(static_cast<double>(runs.new_bytes) / added.why.fetch_seconds() / 1e9);
  }
  return absl::OkStatus();
}

absl::Status FetchBench::Run() {
  RETURN_IF_ERROR(StartMesh());
  // Up to the first token after the last state that is kept: turns part where it stands.
  const int64_t tokens = (o_.context - 1) / kBlockTokens * kBlockTokens + 1;
  context_ = BenchPrompt(kContextSequence, tokens, here_->vocab());
  RETURN_IF_ERROR(here_->Ask(context_, kAnswerTokens).status());
  // There the state stays; along one conversation newer ones would replace it.
  for (int i = 0; i < 2; ++i) {
    std::vector<TokenId> prompt = context_;
    const std::vector<TokenId> more = More(o_.append);
    prompt.insert(prompt.end(), more.begin(), more.end());
    RETURN_IF_ERROR(here_->Ask(prompt, kAnswerTokens).status());
  }
  for (int r = -1; r < o_.repetitions; ++r) RETURN_IF_ERROR(Turn(r));  // the first is not counted
  return absl::OkStatus();
}

}  // namespace

std::vector<double> FetchRuns::over_computed() const {
  std::vector<double> over;
  if (computed_first.empty()) return over;
  for (const double first : fetched_first) over.push_back(first / Median(computed_first));
  return over;
}

absl::StatusOr<FetchRuns> MeasureFetches(const FetchBenchOptions& options) {
  FetchBench bench(options);
  RETURN_IF_ERROR(bench.Run());
  return std::move(bench.runs);
}

}  // namespace deltamesh
