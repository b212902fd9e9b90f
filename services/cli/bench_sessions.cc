#include "services/cli/bench_sessions.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/model/model.h"
#include "services/cli/bench_engine.h"
#include "services/cli/bench_fetch.h"
#include "services/cli/bench_handoff.h"
#include "services/cli/bench_rows.h"
#include "services/cli/bench_turns.h"
#include "services/cli/byte_text.h"
#include "services/cli/load_progress.h"
#include "services/cli/local_mesh.h"
#include "services/cli/random_model.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kLongest = absl::Minutes(15);  // for one request
constexpr int64_t kAnswerTokens = 8;
constexpr double kTurnBar = 1.2;
constexpr int64_t kHandoffMibMax = 256;
// Sequences of BenchTokens: no two prompts alike.
constexpr uint64_t kContextSequence = 1, kWarmSequence = 2, kAloneSequence = 1000,
                   kAppendSequence = 2000;

struct Figure {
  std::string name, unit;
  std::vector<double> runs;   // the median counts
  std::optional<double> bar;  // at most

  double value() const { return Median(runs); }
  bool met() const { return !bar || value() <= *bar; }
};

class SessionBench {
 public:
  SessionBench(const SessionBenchOptions& options, std::string model, Model* loaded)
      : o_(options),
        model_(std::move(model)),
        kept_((o_.context - 1) / kBlockTokens * kBlockTokens),
        left_(o_.context + o_.append - kept_),
        behind_(loaded, o_.threads, o_.chunk_tokens),
        empty_(loaded, o_.threads, o_.chunk_tokens) {}

  absl::Status Run();
  std::vector<Figure> Figures() const;
  int64_t handed_over() const { return handed_over_; }
  const FetchRuns& fetches() const { return fetches_; }
  int64_t left() const { return left_; }

 private:
  absl::Status StartMesh();
  absl::StatusOr<double> TimeEngine(BenchEngine& engine, int64_t tokens);
  absl::Status TurnByTurn();
  absl::Status Handoffs();
  absl::Status Fetches();
  const StateLayout& layout() const { return behind_.model().state_layout(); }

  const SessionBenchOptions& o_;
  const std::string model_;
  const int64_t kept_;  // tokens that are restored at most
  const int64_t left_;  // tokens of a turn that are not
  BenchEngine behind_, empty_;
  std::unique_ptr<LocalMesh> mesh_;
  std::unique_ptr<TurnClient> client_;

  std::vector<double> cold_, again_, again_left_, append_, append_left_, alone_;
  std::vector<double> engine_behind_, engine_empty_, handoff_all_, handoff_new_;
  int64_t handed_over_ = 0;
  FetchRuns fetches_;
};

absl::Status SessionBench::StartMesh() {
  const int64_t context = o_.context + o_.append + 2048;
  const int64_t state = layout().slab_bytes() + context / kBlockTokens * layout().block_bytes();
  const int64_t mib = std::max<int64_t>(512, 4 * state >> 20);
  LocalMeshOptions o;
  o.model = model_;
  o.threads = o_.threads;
  o.experts = 0;
  o.weights = o_.weights;
  o.activations = o_.activations;
  o.packed_dir = o_.packed_dir;
  for (const std::string& flag :
       {absl::StrFormat("--context-tokens=%d", context), absl::StrFormat("--cache-mib=%d", mib),
        absl::StrFormat("--latent-blocks=%d", 8 * context / kBlockTokens)}) {
    o.flags.push_back("--worker-flag=" + flag);
  }
  ASSIGN_OR_RETURN(mesh_, LocalMesh::Start(o));
  client_ = std::make_unique<TurnClient>(mesh_->router(), kLongest);
  RETURN_IF_ERROR(client_->Open());
  // Connections and memory as in the middle of a day's work.
  for (uint64_t i = 0; i < 2; ++i) {
    const auto prompt = BenchPrompt(kWarmSequence + (i << 16), 200, client_->vocab());
    RETURN_IF_ERROR(client_->Ask(prompt, kAnswerTokens).status());
  }
  return absl::OkStatus();
}

absl::StatusOr<double> SessionBench::TimeEngine(BenchEngine& engine, int64_t tokens) {
  const double start = BenchSeconds();
  RETURN_IF_ERROR(engine.Feed(tokens));
  return BenchSeconds() - start;
}

absl::Status SessionBench::TurnByTurn() {
  const std::vector<TokenId> context = BenchPrompt(kContextSequence, o_.context, client_->vocab());
  ASSIGN_OR_RETURN(const SeenTurn cold, client_->Ask(context, kAnswerTokens));
  if (cold.cached_tokens != 0) return Internal("a new prompt had %d tokens", cold.cached_tokens);
  cold_.push_back(cold.first_token);
  for (int r = -1; r < o_.repetitions; ++r) {  // the first is not counted
    const auto turn = static_cast<uint64_t>(r + 1);
    ASSIGN_OR_RETURN(const SeenTurn again, client_->Ask(context, kAnswerTokens));
    std::vector<TokenId> longer = context;
    const std::vector<TokenId> more =
        BenchPrompt(kAppendSequence + turn, o_.append, client_->vocab());
    longer.insert(longer.end(), more.begin(), more.end());
    ASSIGN_OR_RETURN(const SeenTurn append, client_->Ask(longer, kAnswerTokens));
    RETURN_IF_ERROR(behind_.Return(left_));
    ASSIGN_OR_RETURN(const double behind, TimeEngine(behind_, left_));
    ASSIGN_OR_RETURN(
        const SeenTurn alone,
        client_->Ask(BenchPrompt(kAloneSequence + turn, left_, client_->vocab()), kAnswerTokens));
    RETURN_IF_ERROR(empty_.Restart(1, left_));
    ASSIGN_OR_RETURN(const double empty, TimeEngine(empty_, left_));
    if (r < 0) continue;
    again_.push_back(again.first_token);
    again_left_.push_back(static_cast<double>(again.prompt_tokens - again.cached_tokens));
    append_.push_back(append.first_token);
    append_left_.push_back(static_cast<double>(append.prompt_tokens - append.cached_tokens));
    alone_.push_back(alone.first_token);
    engine_behind_.push_back(behind);
    engine_empty_.push_back(empty);
    ASSIGN_OR_RETURN(const v1::RequestExplanation why, client_->Explain(append.request_id));
    handed_over_ += why.handoff_bytes() > 0;
  }
  return absl::OkStatus();
}

// The other process is not warned of the sizes, so the nearest whole MiB stand for them.
absl::Status SessionBench::Handoffs() {
  const int64_t blocks = (kept_ + left_) / kBlockTokens;
  const int64_t fixed = layout().snapshot_bytes();
  const std::pair<int64_t, std::vector<double>*> sizes[] = {
      {fixed + blocks * layout().block_bytes(), &handoff_all_},
      {fixed + left_ / kBlockTokens * layout().block_bytes(), &handoff_new_}};
  for (const auto& [bytes, seconds] : sizes) {
    const int64_t mib = std::clamp<int64_t>(bytes >> 20, 1, kHandoffMibMax);
    HandoffBenchOptions handoff;
    handoff.mib = {mib};
    handoff.in_flight = {1};
    handoff.moved_mib = std::min<int64_t>(4 * mib, 256);
    handoff.repetitions = o_.repetitions;
    handoff.ceiling = false;
    std::vector<BenchRow> rows;
    RETURN_IF_ERROR(MeasureHandoff(handoff, &rows));
    for (const double rate : rows.front().runs) {
      seconds->push_back(static_cast<double>(bytes) / rate);
    }
  }
  return absl::OkStatus();
}

// A mesh of its own, whose routers place turns where this one would not.
absl::Status SessionBench::Fetches() {
  client_.reset();
  mesh_.reset();
  ASSIGN_OR_RETURN(fetches_, MeasureFetches({.model = model_,
                                             .threads = o_.threads,
                                             .weights = o_.weights,
                                             .activations = o_.activations,
                                             .packed_dir = o_.packed_dir,
                                             .layout = layout(),
                                             .context = o_.context,
                                             .append = o_.append,
                                             .repetitions = o_.repetitions}));
  return absl::OkStatus();
}

absl::Status SessionBench::Run() {
  RETURN_IF_ERROR(Handoffs());
  RETURN_IF_ERROR(behind_.Restart(1, kept_ + left_, kContextSequence));
  RETURN_IF_ERROR(behind_.Feed(kept_));
  behind_.Keep();
  RETURN_IF_ERROR(StartMesh());
  RETURN_IF_ERROR(TurnByTurn());
  return Fetches();
}

std::vector<Figure> SessionBench::Figures() const {
  const double handoff = Median(handoff_new_);
  std::vector<double> of_behind, of_empty, factor;
  for (size_t i = 0; i < append_.size(); ++i) {
    of_behind.push_back(append_[i] / (engine_behind_[i] + handoff));
    of_empty.push_back(append_[i] / (engine_empty_[i] + handoff));
    factor.push_back(engine_behind_[i] / engine_empty_[i]);
  }
  std::vector<Figure> all = {
      {"cold_ttft", "s", cold_, {}},
      {"same_prompt_ttft", "s", again_, {}},
      {"same_prompt_not_restored", "tokens", again_left_, double{kBlockTokens}},
      {"turn_ttft", "s", append_, {}},
      {"turn_not_restored", "tokens", append_left_, static_cast<double>(left_)},
      {"engine_behind_context", "s", engine_behind_, {}},
      {"engine_from_empty", "s", engine_empty_, {}},
      {"prompt_alone_ttft", "s", alone_, {}},
      {"handoff_of_all", "s", handoff_all_, {}},
      {"handoff_of_what_is_new", "s", handoff_new_, {}},
      {"behind_context_over_from_empty", "x", factor, {}},
      {"turn_over_engine_behind_and_handoff", "x", of_behind, kTurnBar},
      {"turn_over_engine_from_empty_and_handoff", "x", of_empty, {}},
      {"fetch_of_all", "s", fetches_.all_seconds, {}},
      {"fetch_of_all_rate", "GB/s", fetches_.all_rate, {}},
      {"fetch_of_what_a_turn_added", "s", fetches_.new_seconds, {}},
      {"fetch_of_what_a_turn_added_rate", "GB/s", fetches_.new_rate, {}},
      {"fetching_turn_ttft", "s", fetches_.fetched_first, {}},
      {"computing_turn_ttft", "s", fetches_.computed_first, {}},
      {"fetching_over_computing", "x", fetches_.over_computed(), {}}};
  // The planner may rather have computed what was to be fetched.
  std::erase_if(all, [](const Figure& f) { return f.runs.empty(); });
  return all;
}

std::string Explained(const Figure& f, const SessionBenchOptions& o, int64_t left) {
  const std::pair<const char*, std::string> said[] = {
      {"cold_ttft", absl::StrFormat("first token of a new prompt of %d tokens", o.context)},
      {"same_prompt_ttft", "first token of the same prompt again"},
      {"same_prompt_not_restored", "its tokens that were computed again"},
      {"turn_ttft", absl::StrFormat("first token of a turn that adds %d", o.append)},
      {"turn_not_restored", "its tokens that were computed"},
      {"engine_behind_context", absl::StrFormat("an engine alone: %d tokens behind it", left)},
      {"engine_from_empty", absl::StrFormat("an engine alone: %d tokens from empty", left)},
      {"prompt_alone_ttft", absl::StrFormat("first token of a new prompt of %d", left)},
      {"handoff_of_all", "a hand-off of the whole state"},
      {"handoff_of_what_is_new", "a hand-off of what the turn adds"},
      {"behind_context_over_from_empty", "the engine's two, one over the other"},
      {"turn_over_engine_behind_and_handoff",
       "turn / (engine behind it + hand-off of what is new)"},
      {"turn_over_engine_from_empty_and_handoff", "turn / (engine from empty + the same)"},
      {"fetch_of_all", "a prefill worker fetches the whole state from decode"},
      {"fetch_of_all_rate", "which is"},
      {"fetch_of_what_a_turn_added", "the same of what a turn added there"},
      {"fetch_of_what_a_turn_added_rate", "which is"},
      {"fetching_turn_ttft", "first token of a turn that fetches the whole state"},
      {"computing_turn_ttft", "first token of the same turn, computed again"},
      {"fetching_over_computing", "one over the other"}};
  for (const auto& [name, words] : said) {
    if (f.name == name) return words;
  }
  return f.name;
}

void Print(const SessionBenchOptions& o, const SessionBench& bench, std::ostream& out) {
  for (const Figure& f : bench.Figures()) {
    const auto [low, high] = std::minmax_element(f.runs.begin(), f.runs.end());
    const double scale = f.unit == "s" ? 1e3 : 1;
    out << absl::StrFormat("%-52s %10.*f %-6s %9.*f .. %-9.*f", Explained(f, o, bench.left()),
                           f.unit == "x"                       ? 3
                           : f.unit == "s" || f.unit == "GB/s" ? 2
                                                               : 0,
                           f.value() * scale, f.unit == "s" ? "ms" : f.unit, f.unit == "x" ? 3 : 2,
                           *low * scale, f.unit == "x" ? 3 : 2, *high * scale);
    if (f.bar) out << absl::StrFormat(" at most %g: %s", *f.bar, f.met() ? "met" : "MISSED");
    out << "\n";
  }
  out << absl::StrFormat(
      "%d of %d turns were computed by a prefill worker and handed over, the others by the decode "
      "worker that held the state\n",
      bench.handed_over(), o.repetitions);
  out << absl::StrFormat(
      "%d of %d turns fetched the whole state (%d bytes), %d what a turn had added (%d bytes); "
      "what "
      "was not fetched was quicker to compute, by the router's estimate\n",
      bench.fetches().all_seconds.size(), o.repetitions, bench.fetches().all_bytes,
      bench.fetches().new_seconds.size(), bench.fetches().new_bytes);
}

nlohmann::ordered_json Json(const SessionBenchOptions& o, const SessionBench& bench) {
  nlohmann::ordered_json doc = {{"model", o.model.empty() ? "random" : o.model},
                                {"threads", o.threads},
                                {"context_tokens", o.context},
                                {"append_tokens", o.append},
                                {"turns", o.repetitions},
                                {"turns_handed_over", bench.handed_over()},
                                {"fetched_bytes_of_all", bench.fetches().all_bytes},
                                {"fetched_bytes_of_a_turn", bench.fetches().new_bytes}};
  for (const Figure& f : bench.Figures()) {
    nlohmann::ordered_json& figure = doc["figures"][f.name];
    figure = {{"median", f.value()}, {"unit", f.unit}, {"runs", f.runs}};
    if (f.bar) {
      figure["bar_at_most"] = *f.bar;
      figure["met"] = f.met();
    }
  }
  return doc;
}

absl::Status Check(const SessionBenchOptions& o) {
  if (o.context < 2 * kBlockTokens || o.context > 1 << 20) {
    return InvalidArgument("context: %d tokens; use %d to %d", o.context, 2 * kBlockTokens,
                           1 << 20);
  }
  if (o.append < 1 || o.append > 1 << 16) {
    return InvalidArgument("append: %d tokens; use 1 to %d", o.append, 1 << 16);
  }
  return absl::OkStatus();
}

}  // namespace

void AddSessionBenchFlags(CLI::App* app, SessionBenchOptions* o) {
  app->add_option("--model", o->model, "checkpoint folder (default: a small random model)")
      ->envname("DELTAMESH_MODEL");
  app->add_option("--threads", o->threads, "threads of the engine and of each worker")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  AddToolLoadFlags(app, &o->weights, &o->activations, &o->packed_dir);
  app->add_option("--context", o->context, "tokens of the long prompt")->capture_default_str();
  app->add_option("--append", o->append, "tokens that a turn adds")->capture_default_str();
  app->add_option("--chunk-tokens", o->chunk_tokens, "prompt tokens per call of the engine")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option("--repetitions", o->repetitions, "turns; the median is reported")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_flag("--json", o->json, "JSON instead of the table");
}

absl::Status RunSessionBench(const SessionBenchOptions& o, std::ostream& out) {
  InitLog("bench-sessions", LogLevel::kWarning);
  RETURN_IF_ERROR(Check(o));
  std::unique_ptr<ScratchFolder> scratch;
  ASSIGN_OR_RETURN(const std::string folder, NamedOrRandomModel(o.model, &scratch));
  const SystemClock clock;
  ASSIGN_OR_RETURN(const LoadOptions load,
                   ToolLoadOptions(folder, o.threads, o.weights, o.activations, o.packed_dir,
                                   &clock, &std::cerr));
  ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(folder, load));
  SessionBench bench(o, folder, model.get());
  RETURN_IF_ERROR(bench.Run());
  if (o.json) {
    out << Json(o, bench).dump(1) << "\n";
  } else {
    Print(o, bench, out);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
