#include "services/cli/bench.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/cpu_features.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/model/model.h"
#include "services/cli/bench_cost.h"
#include "services/cli/bench_engine.h"
#include "services/cli/bench_load.h"
#include "services/cli/bench_overhead.h"
#include "services/cli/bench_rows.h"
#include "services/cli/bench_tokens.h"
#include "services/cli/load_progress.h"
#include "services/cli/roofline.h"

namespace deltamesh {
namespace {

constexpr int64_t kMibBytes = int64_t{1} << 20;

bool Wants(const BenchOptions& o, std::string_view section) {
  return std::find(o.sections.begin(), o.sections.end(), section) != o.sections.end();
}

class Bench {
 public:
  Bench(const BenchOptions& options, Model* model, const RooflineProbe* probe)
      : options_(options), probe_(probe), engine_(model, options.threads, options.chunk_tokens) {}

  // Whatever comes of it, `rows` holds what was measured.
  absl::Status Run();
  const std::vector<BenchRow>& rows() const { return rows_; }

 private:
  bool Wants(std::string_view section) const { return ::deltamesh::Wants(options_, section); }
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
    row.AddOthers(others);
    row.runs.push_back(rate);
    if (ceiling) {
      const double after = ceiling();
      row.ceiling_runs.push_back((std::exchange(before, after) + after) / 2);
    }
  }
  rows_.push_back(std::move(row));
  return absl::OkStatus();
}

absl::Status Bench::Prefill(int64_t tokens) {
  BenchRow row = {.test = "prefill", .n = tokens, .runs = {}, .ceiling = "", .ceiling_runs = {}};
  std::function<double()> ceiling;
  if (probe_ != nullptr) {
    const bool int8 = options_.activations == "int8";
    row.ceiling = int8 ? "8-bit product peak" : "multiply-add peak";
    const Model& model = engine_.model();
    const double flops = TokenFlops(model, static_cast<double>(tokens) / 2);
    const double narrow = int8 ? TokenNarrowFlops(model, options_.weights == "8bit") : 0;
    ceiling = [this, flops, narrow] {
      const double wide = (flops - narrow) / probe_->FmaFlops();
      return 1 / (narrow > 0 ? wide + narrow / probe_->Int8Ops() : wide);
    };
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
  for (const int64_t n : options_.mesh_sequences) {
    o.mesh.sequences = std::max(o.mesh.sequences, n);
  }
  for (const int64_t shards : options_.mesh_experts) {
    o.mesh.experts = static_cast<int>(shards);
    RETURN_IF_ERROR(Annotate(MeasureOverhead(o, &engine_, &rows_), "section mesh"));
  }
  return absl::OkStatus();
}

absl::Status Bench::Run() {
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
    RETURN_IF_ERROR(Annotate(MeasureHandoff(handoff, &rows_), "section handoff"));
  }
  return Wants("mesh") ? Mesh() : absl::OkStatus();
}

// What it took until the model could be used, before anything else was held.
struct Start {
  double seconds;
  int64_t resident_bytes;
};

void PrintCeilings(const Roofline& roof, std::ostream& out) {
  out << absl::StrFormat(
      "ceilings  read %.1f GB/s median (%.1f best)  multiply-add %.1f GFLOP/s (%.1f best)  8-bit "
      "products %.1f Gop/s (%.1f best)\n",
      roof.read_bytes_per_second.median / 1e9, roof.read_bytes_per_second.best / 1e9,
      roof.fma_flops.median / 1e9, roof.fma_flops.best / 1e9, roof.int8_ops.median / 1e9,
      roof.int8_ops.best / 1e9);
}

nlohmann::ordered_json CeilingsJson(const Roofline& roof) {
  return {{"read_gbs_best", roof.read_bytes_per_second.best / 1e9},
          {"read_gbs_median", roof.read_bytes_per_second.median / 1e9},
          {"fp32_fma_gflops_best", roof.fma_flops.best / 1e9},
          {"fp32_fma_gflops_median", roof.fma_flops.median / 1e9},
          {"int8_gops_best", roof.int8_ops.best / 1e9},
          {"int8_gops_median", roof.int8_ops.median / 1e9}};
}

void PrintTable(const BenchOptions& o, const Model& model, const Start& start, const Bench& bench,
                const absl::Status&, const Roofline* roof, std::ostream& out) {
  out << absl::StrFormat("model     %s, %s weights, %s activations, %d MiB, %d threads, %s\n",
                         o.model, o.weights, o.activations, model.weight_bytes() / kMibBytes,
                         o.threads, kernels::CpuTargets().front());
  out << absl::StrFormat(
      "start     ready in %.2f s%s, %d MiB resident, %.2f of the weights\n", start.seconds,
      model.packed().built ? ", packing included" : "", start.resident_bytes / kMibBytes,
      static_cast<double>(start.resident_bytes) / static_cast<double>(model.weight_bytes()));
  if (roof != nullptr) PrintCeilings(*roof, out);
  PrintRows(bench.rows(), out);
}

// The results have the keys that other engines' benchmarks write, so that scripts can put them side by side.
void PrintJson(const BenchOptions& o, const Model& model, const Start& start, const Bench& bench,
               const absl::Status& status, const Roofline* roof, std::ostream& out) {
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
  if (roof != nullptr) doc["ceilings"] = CeilingsJson(*roof);
  // Rows in bytes have other keys and stand apart.
  std::vector<BenchRow> tokens, bytes;
  for (const BenchRow& row : bench.rows()) (row.test == "handoff" ? bytes : tokens).push_back(row);
  doc["results"] = RowsJson(tokens);
  doc["handoff"] = RowsJson(bytes);
  if (!status.ok()) doc["failed"] = MessageOf(status);
  out << JsonText(doc);
}

// Shards of a model without routed experts are none.
absl::Status CheckShards(const ModelConfig& config, std::vector<int64_t>* shards) {
  const int64_t experts = config.CountFfn(FfnKind::kMoe) > 0 ? config.experts : 0;
  if (experts == 0) *shards = {0};
  for (const int64_t n : *shards) {
    if (n <= experts) continue;
    return InvalidArgument("mesh-experts: %d shards of %d experts; use at most one per expert", n,
                           experts);
  }
  return absl::OkStatus();
}

// The machine's ceilings by themselves; needs no model.
absl::Status RunRoofline(const BenchOptions& o, std::ostream& out) {
  if (o.roofline_seconds <= 0) {
    return InvalidArgument("roofline-seconds: %g with --roofline; use more than 0",
                           o.roofline_seconds);
  }
  ASSIGN_OR_RETURN(
      const auto probe,
      RooflineProbe::Create({.threads = o.threads, .seconds = o.roofline_seconds, .mxfp4 = false}));
  if (!o.json) {
    PrintCeilings(probe->roofline(), out);
  } else {
    out << JsonText({{"threads", o.threads},
                     {"system", kernels::CpuTargets().front()},
                     {"ceilings", CeilingsJson(probe->roofline())}});
  }
  out << std::flush;
  return absl::OkStatus();
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
  return Wants(o, "handoff") ? CheckHandoffOptions(o.handoff) : absl::OkStatus();
}

// A list such as 1,4,8, whole: CLI11 by itself passes over empty entries.
CLI::Option* AddCounts(CLI::App* app, const char* name, std::vector<int64_t>* values,
                       const std::string& description) {
  const auto take = [=](const std::string& text) {
    values->clear();
    for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ','))) {
      if (!absl::SimpleAtoi(part, &values->emplace_back())) {
        throw CLI::ValidationError(name, text + ": use numbers such as 1,4,8");
      }
    }
  };
  return app->add_option_function<std::string>(name, take, description)
      ->default_str(absl::StrJoin(*values, ","))
      ->type_name("INT,...");
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
  AddCounts(app, "--prefill", &o->prefill, "prompt lengths: 128,512");
  AddCounts(app, "--sequences", &o->sequences, "batch sizes for decoding");
  AddCounts(app, "--depths", &o->depths, "contexts for decoding one sequence, in tokens");
  AddCounts(app, "--handoff-mib", &o->handoff.mib, "sizes of handed-over states, in MiB");
  AddCounts(app, "--handoff-in-flight", &o->handoff.in_flight, "hand-offs at once");
  app->add_option("--handoff-moved-mib", o->handoff.moved_mib, "MiB of hand-offs per measurement")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str();
  AddCounts(app, "--mesh-sequences", &o->mesh_sequences, "streams at once through the mesh");
  AddCounts(app, "--mesh-experts", &o->mesh_experts,
            "expert shards of the meshes, one mesh after the other; 0: experts in each worker");
  app->add_option("--decode-steps", o->decode_steps, "steps per measurement")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app->add_option("--chunk-tokens", o->chunk_tokens, "prompt tokens per call")
      ->check(CLI::Range(int64_t{1}, kForwardTokensMax))
      ->capture_default_str();
  app->add_option("--repetitions", o->repetitions, "the median is reported")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_flag("--roofline", o->roofline,
                "instead: only the ceilings of this machine, without a model");
  app->add_option("--roofline-seconds", o->roofline_seconds,
                  "of each probe of the machine; 0: no probes and no fractions")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str();
  app->add_flag("--json", o->json, "JSON instead of a table");
  app->add_option("--label", o->label, "free text for the JSON");
}

bool NeedsScratch(const BenchOptions& options) { return Wants(options, "mesh"); }

absl::Status RunBench(BenchOptions options, std::ostream& out) {
  InitLog("bench", LogLevel::kWarning);
  if (options.roofline) return RunRoofline(options, out);
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(options.model));
  if (Wants(options, "mesh")) RETURN_IF_ERROR(CheckShards(config, &options.mesh_experts));
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
    ASSIGN_OR_RETURN(probe,
                     RooflineProbe::Create({.threads = options.threads,
                                            .seconds = options.roofline_seconds,
                                            .mxfp4 = config.experts > 0 && config.experts_mxfp4}));
  }
  const Roofline* ceilings = probe ? &probe->roofline() : nullptr;
  Bench bench(options, model.get(), probe.get());
  const absl::Status status = bench.Run();
  if (status.ok() || !bench.rows().empty()) {  // what was measured is worth keeping
    (options.json ? PrintJson : PrintTable)(options, *model, start, bench, status, ceilings, out);
    out << std::flush;
  }
  return status;
}

}  // namespace deltamesh
