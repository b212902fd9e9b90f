#include "services/cli/bench.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "CLI/CLI.hpp"
#include "kernels/base/cpu_features.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/model/model.h"
#include "services/cli/bench_cost.h"
#include "services/cli/bench_engine.h"
#include "services/cli/bench_overhead.h"
#include "services/cli/bench_rows.h"
#include "services/cli/bench_tokens.h"
#include "services/cli/load_progress.h"
#include "services/cli/roofline.h"

namespace deltamesh {
namespace {

constexpr int64_t kMibBytes = int64_t{1} << 20;

class Bench {
 public:
  Bench(const BenchOptions& options, Model* model, const RooflineProbe* probe)
      : options_(options), probe_(probe), engine_(model, options.threads, options.chunk_tokens) {}

  absl::StatusOr<std::vector<BenchRow>> Run();

 private:
  bool Wants(std::string_view section) const {
    return std::find(options_.sections.begin(), options_.sections.end(), section) !=
           options_.sections.end();
  }
  // Runs `measure` for each repetition, between two looks at its ceiling (null: none), and adds the row.
  template <typename Measure>
  absl::Status Add(BenchRow row, const std::function<double()>& ceiling, const Measure& measure);
  absl::Status Prefill(int64_t tokens);
  absl::Status Decode(int64_t sequences, int64_t depth);
  absl::Status Mesh();

  const BenchOptions& options_;
  const RooflineProbe* const probe_;  // may be null
  BenchEngine engine_;
  std::vector<BenchRow> rows_;
};

template <typename Measure>
absl::Status Bench::Add(BenchRow row, const std::function<double()>& ceiling,
                        const Measure& measure) {
  double before = ceiling ? ceiling() : 0;
  for (int r = 0; r < options_.repetitions; ++r) {
    double others = 0;
    ASSIGN_OR_RETURN(const double rate, measure(&others));
    row.runs.push_back(rate);
    if (ceiling) {
      const double after = ceiling();
      row.ceiling_runs.push_back((std::exchange(before, after) + after) / 2);
    }
    row.others = others < 0 ? others : std::max(row.others, others);
  }
  rows_.push_back(std::move(row));
  return absl::OkStatus();
}

absl::Status Bench::Prefill(int64_t tokens) {
  BenchRow row = {.test = "prefill", .n = tokens, .runs = {}, .ceiling = "", .ceiling_runs = {}};
  std::function<double()> ceiling;
  if (probe_ != nullptr) {
    row.ceiling = "multiply-add peak";
    const double flops = TokenFlops(engine_.model(), static_cast<double>(tokens) / 2);
    ceiling = [this, flops] { return probe_->FmaFlops() / flops; };
  }
  return Add(std::move(row), ceiling, [&](double* others) -> absl::StatusOr<double> {
    RETURN_IF_ERROR(engine_.Restart(1, tokens));
    const OtherLoad load;
    const double start = BenchSeconds();
    RETURN_IF_ERROR(engine_.Feed(tokens));
    const double seconds = BenchSeconds() - start;
    *others = load.cores();
    return static_cast<double>(tokens) / seconds;
  });
}

// Behind a context every repetition starts from the same kept state.
absl::Status Bench::Decode(int64_t sequences, int64_t depth) {
  const int64_t steps = options_.decode_steps;
  BenchRow row = {.test = "decode",
                  .n = steps,
                  .depth = depth,
                  .seqs = sequences,
                  .runs = {},
                  .ceiling = "",
                  .ceiling_runs = {}};
  std::function<double()> ceiling;
  if (probe_ != nullptr) {
    row.ceiling = "read bandwidth";
    const double context = static_cast<double>(depth) + static_cast<double>(steps) / 2;
    const double bytes =
        StepBytes(engine_.model(), sequences, context) / static_cast<double>(sequences);
    ceiling = [this, bytes] { return probe_->ReadBytesPerSecond() / bytes; };
  }
  if (depth > 0) {
    RETURN_IF_ERROR(engine_.Restart(1, depth + steps));
    RETURN_IF_ERROR(engine_.Feed(depth));
    engine_.Keep();
  }
  return Add(std::move(row), ceiling, [&](double* others) -> absl::StatusOr<double> {
    RETURN_IF_ERROR(depth > 0 ? engine_.Return(steps) : engine_.Restart(sequences, steps));
    const OtherLoad load;
    const double start = BenchSeconds();
    for (int64_t i = 0; i < steps; ++i) RETURN_IF_ERROR(engine_.Step());
    const double seconds = BenchSeconds() - start;
    *others = load.cores();
    return static_cast<double>(steps * sequences) / seconds;
  });
}

absl::Status Bench::Mesh() {
  OverheadOptions o;
  o.mesh.model = options_.model;
  o.mesh.threads = options_.threads;
  o.mesh.weights = options_.weights;
  o.mesh.activations = options_.activations;
  o.mesh.packed_dir = options_.packed_dir;
  o.prefill = options_.prefill;
  o.sequences = options_.mesh_sequences;
  o.decode_steps = options_.decode_steps;
  o.repetitions = options_.repetitions;
  for (const int64_t shards : options_.mesh_experts) {
    o.mesh.experts = static_cast<int>(shards);
    absl::StatusOr<std::vector<BenchRow>> rows = MeasureOverhead(o, &engine_);
    if (!rows.ok()) return Annotate(rows.status(), "section mesh");
    std::move(rows->begin(), rows->end(), std::back_inserter(rows_));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<BenchRow>> Bench::Run() {
  for (const int64_t n : options_.prefill) {
    if (Wants("prefill")) RETURN_IF_ERROR(Prefill(n));
  }
  if (Wants("decode")) RETURN_IF_ERROR(Decode(1, 0));
  for (const int64_t n : options_.sequences) {
    if (Wants("batch")) RETURN_IF_ERROR(Decode(n, 0));
  }
  for (const int64_t depth : options_.depths) {
    if (Wants("context")) RETURN_IF_ERROR(Decode(1, depth));
  }
  if (Wants("handoff")) {
    HandoffBenchOptions handoff = options_.handoff;
    handoff.repetitions = options_.repetitions;
    absl::StatusOr<std::vector<BenchRow>> rows = MeasureHandoff(handoff);
    if (!rows.ok()) return Annotate(rows.status(), "section handoff");
    std::move(rows->begin(), rows->end(), std::back_inserter(rows_));
  }
  if (Wants("mesh")) RETURN_IF_ERROR(Mesh());
  return std::move(rows_);
}

// What it took until the model could be used, before anything else was held.
struct Start {
  double seconds;
  int64_t resident_bytes;
};

void PrintTable(const BenchOptions& o, const Model& model, const Start& start,
                const std::vector<BenchRow>& rows, const Roofline* roof, std::ostream& out) {
  out << absl::StrFormat("model     %s, %s weights, %s activations, %d MiB, %d threads, %s\n",
                         o.model, o.weights, o.activations, model.weight_bytes() / kMibBytes,
                         o.threads, kernels::CpuTargets().front());
  out << absl::StrFormat(
      "start     ready in %.2f s%s, %d MiB resident, %.2f of the weights\n", start.seconds,
      model.packed().built ? ", packing included" : "", start.resident_bytes / kMibBytes,
      static_cast<double>(start.resident_bytes) / static_cast<double>(model.weight_bytes()));
  if (roof != nullptr) {
    out << absl::StrFormat(
        "ceilings  read %.1f GB/s median (%.1f best)  multiply-add %.1f GFLOP/s (%.1f median)\n",
        roof->read_bytes_per_second.median / 1e9, roof->read_bytes_per_second.best / 1e9,
        roof->fma_flops.best / 1e9, roof->fma_flops.median / 1e9);
  }
  PrintRows(rows, out);
}

// The results have the keys that other engines' benchmarks write, so that scripts can put them side by side.
void PrintJson(const BenchOptions& o, const Model& model, const Start& start,
               const std::vector<BenchRow>& rows, const Roofline* roof, std::ostream& out) {
  nlohmann::ordered_json doc = {{"label", o.label.empty() ? "deltamesh" : o.label},
                                {"model", o.model},
                                {"model_bytes", model.weight_bytes()},
                                {"threads", o.threads},
                                {"weights", o.weights},
                                {"activations", o.activations},
                                {"packed", model.packed().path},
                                {"start_seconds", start.seconds},
                                {"start_packed_now", model.packed().built},
                                {"start_resident_bytes", start.resident_bytes},
                                {"system", kernels::CpuTargets().front()}};
  if (roof != nullptr) {
    doc["ceilings"] = {{"read_gbs_best", roof->read_bytes_per_second.best / 1e9},
                       {"read_gbs_median", roof->read_bytes_per_second.median / 1e9},
                       {"fp32_fma_gflops_best", roof->fma_flops.best / 1e9},
                       {"fp32_fma_gflops_median", roof->fma_flops.median / 1e9}};
  }
  // Rows in bytes have other keys and stand apart.
  std::vector<BenchRow> tokens, bytes;
  for (const BenchRow& row : rows) (row.test == "handoff" ? bytes : tokens).push_back(row);
  doc["results"] = RowsJson(tokens);
  doc["handoff"] = RowsJson(bytes);
  out << doc.dump(1) << "\n";
}

absl::Status CheckOptions(const BenchOptions& o) {
  if (o.model.empty()) return InvalidArgument("model: none given; use --model FOLDER");
  for (const int64_t n : o.prefill) {
    if (n < 1) return InvalidArgument("prefill: %d tokens; use at least 1", n);
  }
  for (const int64_t n : o.depths) {
    if (n < kBlockTokens || n % kBlockTokens != 0) {
      return InvalidArgument("depths: %d; use multiples of %d", n, kBlockTokens);
    }
  }
  for (const auto* list : {&o.sequences, &o.mesh_sequences}) {
    for (const int64_t n : *list) {
      if (n < 1 || n > 1024) return InvalidArgument("sequences: %d; use 1 to 1024", n);
    }
  }
  return absl::OkStatus();
}

}  // namespace

void AddBenchFlags(CLI::App* app, BenchOptions* o) {
  app->add_option("--model", o->model, "checkpoint folder")->envname("DELTAMESH_MODEL");
  app->add_option("--sections", o->sections, "what to measure, of these")
      ->delimiter(',')
      ->check(CLI::IsMember({"prefill", "decode", "batch", "context", "handoff", "mesh"}))
      ->capture_default_str();
  app->add_option("--threads", o->threads, "threads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  AddToolLoadFlags(app, &o->weights, &o->activations, &o->packed_dir);
  app->add_option("--prefill", o->prefill, "prompt lengths: 128,512")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--sequences", o->sequences, "batch sizes for decoding")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--depths", o->depths, "contexts for decoding one sequence, in tokens")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--handoff-mib", o->handoff.mib, "sizes of handed-over states, in MiB")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--handoff-in-flight", o->handoff.in_flight, "hand-offs at once")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--handoff-moved-mib", o->handoff.moved_mib, "MiB of hand-offs per measurement")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str();
  app->add_option("--mesh-sequences", o->mesh_sequences, "streams at once through the mesh")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option(
         "--mesh-experts", o->mesh_experts,
         "expert shards of the meshes, one mesh after the other; 0: experts in each worker")
      ->delimiter(',')
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  app->add_option("--decode-steps", o->decode_steps, "steps per measurement")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app->add_option("--chunk-tokens", o->chunk_tokens, "prompt tokens per call")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option("--repetitions", o->repetitions, "the median is reported")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option("--roofline-seconds", o->roofline_seconds,
                  "of each probe of the machine; 0: no probes and no fractions")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str();
  app->add_flag("--json", o->json, "JSON instead of a table");
  app->add_option("--label", o->label, "free text for the JSON");
}

absl::Status RunBench(const BenchOptions& options, std::ostream& out) {
  InitLog("bench", LogLevel::kWarning);
  RETURN_IF_ERROR(CheckOptions(options));
  const SystemClock clock;
  ASSIGN_OR_RETURN(const LoadOptions load,
                   ToolLoadOptions(options.model, options.threads, options.weights,
                                   options.activations, options.packed_dir, &clock, &std::cerr));
  const double begin = BenchSeconds();
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::Load(options.model, load));
  const Start start = {BenchSeconds() - begin, PeakResidentBytes()};
  RETURN_IF_ERROR(CheckBenchVocab(model->config().vocab));
  std::unique_ptr<RooflineProbe> probe;
  if (options.roofline_seconds > 0) {
    ASSIGN_OR_RETURN(probe, RooflineProbe::Create(
                                {.threads = options.threads, .seconds = options.roofline_seconds}));
  }
  const Roofline* ceilings = probe ? &probe->roofline() : nullptr;
  Bench bench(options, model.get(), probe.get());
  ASSIGN_OR_RETURN(const std::vector<BenchRow> rows, bench.Run());
  (options.json ? PrintJson : PrintTable)(options, *model, start, rows, ceilings, out);
  return absl::OkStatus();
}

}  // namespace deltamesh
