#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "CLI/CLI.hpp"
#include "runtime/base/status.h"
#include "services/cli/bench_long.h"
#include "services/cli/bench_rows.h"
#include "services/cli/long_run.h"
#include "services/cli/random_model.h"

namespace deltamesh {
namespace {

constexpr int64_t kCheckContext = 4096;  // longest context that is also computed
constexpr int64_t kCheckChunk = 512;

struct Side {
  double cache_bytes = 0;  // all of a sequence, state included
  std::vector<double> step_seconds;
};
struct Comparison {
  int64_t context = 0;
  Side hybrid, full;
  double less() const { return 1 - hybrid.cache_bytes / full.cache_bytes; }
  double faster() const { return Median(full.step_seconds) / Median(hybrid.step_seconds); }
};
// The same steps behind a context that was filled and behind one that was computed.
struct FillCheck {
  int64_t context = 0;
  std::vector<double> filled, computed;
  double ratio() const { return Median(filled) / Median(computed); }
};
struct Report {
  std::vector<Comparison> comparisons;
  FillCheck check_hybrid, check_full;
};

// Steps of both in turns, so that both meet the same machine.
absl::Status TimeSteps(int64_t steps, LongRun& a, LongRun& b, std::vector<double>& a_seconds,
                       std::vector<double>& b_seconds) {
  for (int64_t i = -1; i < steps; ++i) {  // the first is not counted
    ASSIGN_OR_RETURN(const double x, a.Step());
    ASSIGN_OR_RETURN(const double y, b.Step());
    if (i < 0) continue;
    a_seconds.push_back(x);
    b_seconds.push_back(y);
  }
  return absl::OkStatus();
}

absl::StatusOr<FillCheck> CheckFill(const std::string& model, int64_t context,
                                    const HybridOptions& o) {
  FillCheck check = {.context = context, .filled = {}, .computed = {}};
  ASSIGN_OR_RETURN(const auto filled, LongRun::Create(model, o.run, context));
  ASSIGN_OR_RETURN(const auto computed, LongRun::Create(model, o.run, context));
  RETURN_IF_ERROR(filled->Fill(context));
  RETURN_IF_ERROR(computed->Feed(context, kCheckChunk).status());
  RETURN_IF_ERROR(TimeSteps(2 * o.decode_steps, *filled, *computed, check.filled, check.computed));
  return check;
}

absl::StatusOr<std::vector<int64_t>> Contexts(const HybridOptions& o) {
  std::vector<int64_t> contexts;
  for (const std::string& text : o.contexts) {
    ASSIGN_OR_RETURN(const int64_t n, ParseTokenCount(text));
    if (n % kBlockTokens != 0) {
      return InvalidArgument("contexts: %s; use multiples of %d", text, kBlockTokens);
    }
    contexts.push_back(n);
  }
  if (contexts.empty()) return InvalidArgument("contexts: none given; use 128k,1M");
  std::sort(contexts.begin(), contexts.end());
  return contexts;
}

void PrintTable(const HybridOptions& o, const RandomShape& s, const Report& r, std::ostream& out) {
  const auto kda = s.layers - std::ssize(s.full);
  out << absl::StrFormat(
      "hybrid %d KDA + %d MLA layers; full %d MLA layers; the same random shape: hidden %d, KDA %d "
      "x %d, MLA %d heads, latent %d + %d; float32 state, %s weights, %s activations, %d threads\n",
      kda, s.layers - kda, s.layers, s.hidden, s.kda_heads, s.kda_dim, s.heads, s.rank, s.rope,
      o.run.weights, o.run.activations, o.run.threads);
  out << "context    cache, bytes per token (state included)      decode, ms per token\n"
         "             hybrid       full      less               hybrid       full   faster\n";
  for (const Comparison& c : r.comparisons) {
    const auto n = static_cast<double>(c.context);
    out << absl::StrFormat(
        "%-8s %10.1f %10.1f %7.1f %% %20.2f %10.2f %6.2f x\n", TokenCountText(c.context),
        c.hybrid.cache_bytes / n, c.full.cache_bytes / n, 100 * c.less(),
        1e3 * Median(c.hybrid.step_seconds), 1e3 * Median(c.full.step_seconds), c.faster());
  }
  out << absl::StrFormat(
      "contexts are filled with numbers, not computed: a step reads and computes the same. At %s "
      "filled / computed take %.3f / %.3f ms (hybrid), %.3f / %.3f ms (full)\n",
      TokenCountText(r.check_hybrid.context), 1e3 * Median(r.check_hybrid.filled),
      1e3 * Median(r.check_hybrid.computed), 1e3 * Median(r.check_full.filled),
      1e3 * Median(r.check_full.computed));
}

void PrintJson(const HybridOptions& o, const RandomShape& s, const Report& r, std::ostream& out) {
  nlohmann::ordered_json doc = {{"label", "deltamesh hybrid-vs-full"},
                                {"layers", s.layers},
                                {"hybrid_mla_layers", std::ssize(s.full)},
                                {"threads", o.run.threads},
                                {"weights", o.run.weights},
                                {"activations", o.run.activations},
                                {"decode_steps", o.decode_steps},
                                {"contexts_are", "filled, not computed"}};
  for (const Comparison& c : r.comparisons) {
    const auto side = [&](const Side& x) -> nlohmann::ordered_json {
      return {{"cache_bytes", x.cache_bytes},
              {"cache_bytes_per_token", x.cache_bytes / static_cast<double>(c.context)},
              {"decode_ms", 1e3 * Median(x.step_seconds)}};
    };
    doc["results"].push_back({{"context", c.context},
                              {"hybrid", side(c.hybrid)},
                              {"full", side(c.full)},
                              {"cache_less", c.less()},
                              {"decode_faster", c.faster()}});
  }
  const auto check = [](const FillCheck& c) -> nlohmann::ordered_json {
    return {{"context", c.context},
            {"filled_ms", 1e3 * Median(c.filled)},
            {"computed_ms", 1e3 * Median(c.computed)},
            {"filled_over_computed", c.ratio()}};
  };
  doc["fill_check"] = {{"hybrid", check(r.check_hybrid)}, {"full", check(r.check_full)}};
  out << JsonText(doc);
}

}  // namespace

void AddLongFlags(CLI::App* app, CurveOptions* curve, bool* compare, HybridOptions* hybrid) {
  CLI::Option* const length =
      app->add_option("--curve", curve->lengths,
                      "instead: time per token where one prompt passes these lengths, "
                      "1k,16k,128k,1M; of a small random model without --model")
          ->delimiter(',');
  app->add_flag("--fill", curve->fill,
                "fill the cache of --curve up to the tokens that are timed instead of computing it")
      ->needs(length);
  app->add_option("--memory-mib", curve->memory_mib, "most memory of the process during --curve")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->needs(length)
      ->capture_default_str();
  CLI::Option* const both =
      app->add_flag("--hybrid-vs-full", *compare,
                    "instead: cache and decode time of 3 KDA layers to 1 MLA layer against MLA in "
                    "every layer, on small random models")
          ->excludes(length);
  app->add_option("--contexts", hybrid->contexts, "contexts of --hybrid-vs-full")
      ->delimiter(',')
      ->needs(both)
      ->capture_default_str();
  app->add_option("--hybrid-steps", hybrid->decode_steps, "decode steps of --hybrid-vs-full")
      ->check(CLI::Range(1, 64))
      ->needs(both)
      ->capture_default_str();
}

absl::Status RunHybridVsFull(HybridOptions o, std::ostream& out) {
  o.run.packed_dir = "off";
  ASSIGN_OR_RETURN(const std::vector<int64_t> contexts, Contexts(o));
  ASSIGN_OR_RETURN(const auto scratch, ScratchFolder::Create());
  const RandomShape hybrid_shape;
  RandomShape full_shape;
  full_shape.full.resize(static_cast<size_t>(full_shape.layers));
  std::iota(full_shape.full.begin(), full_shape.full.end(), 1);

  const std::string hybrid_model = scratch->path() + "/hybrid";
  const std::string full_model = scratch->path() + "/full";
  RETURN_IF_ERROR(WriteRandomModel(hybrid_shape, 1, hybrid_model));
  RETURN_IF_ERROR(WriteRandomModel(full_shape, 1, full_model));

  Report report;
  const int64_t longest = contexts.back(), check = std::min(longest, kCheckContext);
  ASSIGN_OR_RETURN(report.check_hybrid, CheckFill(hybrid_model, check, o));
  ASSIGN_OR_RETURN(report.check_full, CheckFill(full_model, check, o));
  ASSIGN_OR_RETURN(const auto hybrid, LongRun::Create(hybrid_model, o.run, longest));
  ASSIGN_OR_RETURN(const auto full, LongRun::Create(full_model, o.run, longest));
  RETURN_IF_ERROR(hybrid->Fill(longest));
  RETURN_IF_ERROR(full->Fill(longest));
  for (const int64_t context : contexts) {
    RETURN_IF_ERROR(hybrid->Return(context));
    RETURN_IF_ERROR(full->Return(context));
    Comparison c = {.context = context, .hybrid = {}, .full = {}};
    c.hybrid.cache_bytes = static_cast<double>(hybrid->CacheBytes(context));
    c.full.cache_bytes = static_cast<double>(full->CacheBytes(context));
    RETURN_IF_ERROR(
        TimeSteps(o.decode_steps, *hybrid, *full, c.hybrid.step_seconds, c.full.step_seconds));
    report.comparisons.push_back(std::move(c));
  }
  (o.json ? PrintJson : PrintTable)(o, hybrid_shape, report, out);
  return absl::OkStatus();
}

}  // namespace deltamesh
