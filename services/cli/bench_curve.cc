#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/base/status.h"
#include "services/cli/bench_long.h"
#include "services/cli/bench_rows.h"
#include "services/cli/long_run.h"
#include "services/cli/random_model.h"

namespace deltamesh {
namespace {

// Narrow enough that attention over a million positions, for each of a million tokens, takes minutes.
RandomShape CurveShape() {
  return {.hidden = 128,
          .layers = 4,
          .full = {4},
          .kda_heads = 2,
          .kda_dim = 64,
          .heads = 1,
          .nope = 16,
          .rope = 16,
          .v_dim = 16,
          .rank = 16,
          .dense_inter = 256,
          .moe_inter = 64,
          .experts = 4,
          .top_k = 1,
          .vocab = 256};
}

constexpr int64_t kFilledWindow = 4096;

struct Point {
  int64_t length;
  int64_t window;  // tokens before `length` that were timed
  PromptTime window_time;
  double seconds;  // since the beginning of the prompt
  int64_t cache_bytes, resident_bytes;
};

absl::StatusOr<std::vector<int64_t>> Lengths(const CurveOptions& o) {
  std::vector<int64_t> lengths;
  for (const std::string& text : o.lengths) {
    ASSIGN_OR_RETURN(const int64_t n, ParseTokenCount(text));
    if (!lengths.empty() && n <= lengths.back()) {
      return InvalidArgument("curve: %s after %s; use ascending lengths", text,
                             TokenCountText(lengths.back()));
    }
    lengths.push_back(n);
  }
  return lengths;
}

void PrintTable(const CurveOptions& o, const LongRun& run, const std::vector<Point>& points,
                std::ostream& out) {
  const ModelConfig& c = run.model().config();
  const int64_t kda = c.CountMixer(MixerKind::kKda);
  out << absl::StrFormat(
      "one prompt, %d KDA and %d MLA layers, %s weights, %s activations, %d tokens a call, %d "
      "threads; "
      "microseconds per token over the last tokens before each length\n",
      kda, c.CountMixer(MixerKind::kMla), o.run.weights, o.run.activations, o.chunk_tokens,
      o.run.threads);
  out << "length   last tokens     all layers   KDA layers*   prompt so far      cache   most "
         "memory\n";
  for (const Point& p : points) {
    const double us = 1e6 / static_cast<double>(p.window);
    const std::string so_far = o.fill ? "-" : absl::StrFormat("%.1f s", p.seconds);
    out << absl::StrFormat("%-8s %11d %14.1f %13.1f %15s %6d MiB %9d MiB\n",
                           TokenCountText(p.length), p.window, us * p.window_time.total,
                           us * p.window_time.kda, so_far, p.cache_bytes >> 20,
                           p.resident_bytes >> 20);
  }
  out << absl::StrFormat(
      "* all %d, each with one feed-forward part\nbound on the memory of this process: %d MiB\n%s",
      kda, o.memory_mib,
      o.fill ? "the cache before the last tokens was filled with numbers, not computed\n" : "");
}

void PrintJson(const CurveOptions& o, const LongRun& run, const std::vector<Point>& points,
               std::ostream& out) {
  const ModelConfig& c = run.model().config();
  nlohmann::ordered_json doc = {{"label", "deltamesh curve"},
                                {"model", o.model.empty() ? "random" : o.model},
                                {"kda_layers", c.CountMixer(MixerKind::kKda)},
                                {"mla_layers", c.CountMixer(MixerKind::kMla)},
                                {"threads", o.run.threads},
                                {"weights", o.run.weights},
                                {"activations", o.run.activations},
                                {"chunk_tokens", o.chunk_tokens},
                                {"cache_is", o.fill ? "filled up to the window" : "computed"},
                                {"memory_bound_mib", o.memory_mib}};
  for (const Point& p : points) {
    const double us = 1e6 / static_cast<double>(p.window);
    doc["curve"].push_back(
        {{"length", p.length},
         {"window", p.window},
         {"us_per_token", us * p.window_time.total},
         {"kda_us_per_token", us * p.window_time.kda},
         {"mla_us_per_token", us * p.window_time.mla},
         {"seconds", o.fill ? nlohmann::ordered_json() : nlohmann::ordered_json(p.seconds)},
         {"cache_bytes", p.cache_bytes},
         {"peak_resident_bytes", p.resident_bytes}});
  }
  out << JsonText(doc);
}

}  // namespace

absl::Status RunCurve(const CurveOptions& o, std::ostream& out, std::ostream& notes) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> lengths, Lengths(o));
  if (lengths.empty()) return InvalidArgument("curve: no lengths; use 1k,16k,128k,1M");
  std::unique_ptr<ScratchFolder> scratch;
  std::string model = o.model;
  LongRunOptions options = o.run;
  if (model.empty()) {
    ASSIGN_OR_RETURN(scratch, ScratchFolder::Create());
    RETURN_IF_ERROR(WriteRandomModel(CurveShape(), 1, scratch->path()));
    model = scratch->path();
    options.packed_dir = "off";
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<LongRun> run,
                   LongRun::Create(model, options, lengths.back()));
  const int64_t bound = o.memory_mib << 20;
  if (const int64_t least = run->PoolBytes() + run->model().weight_bytes(); least > bound) {
    return ResourceExhausted("memory-mib: %d; state and weights alone take %d MiB", o.memory_mib,
                             (least >> 20) + 1);
  }
  std::vector<Point> points;
  double seconds = 0;
  int64_t done = 0;
  for (const int64_t length : lengths) {
    // Long windows: a single call is too short to time beside other work of the machine.
    const int64_t window =
        std::min(length - done, o.fill ? kFilledWindow : std::max(o.chunk_tokens, length / 8));
    PromptTime before;
    if (o.fill) {
      if ((length - window) % kBlockTokens != 0) {
        return InvalidArgument("curve: %s is not a multiple of %d, which --fill needs",
                               TokenCountText(length), kBlockTokens);
      }
      RETURN_IF_ERROR(run->Fill(length - window));
    } else {
      ASSIGN_OR_RETURN(before, run->Feed(length - window - done, o.chunk_tokens));
    }
    ASSIGN_OR_RETURN(const PromptTime time, run->Feed(window, o.chunk_tokens));
    seconds += before.total + time.total;
    done = length;
    points.push_back({length, window, time, seconds, run->CacheBytes(length), PeakResidentBytes()});
    notes << absl::StrFormat("%s: %.1f us per token, %.1f of it in KDA layers\n",
                             TokenCountText(length), 1e6 * time.total / static_cast<double>(window),
                             1e6 * time.kda / static_cast<double>(window))
          << std::flush;
    if (points.back().resident_bytes > bound) {
      return ResourceExhausted("memory-mib: %d; %d MiB were in use at %s tokens; allow more",
                               o.memory_mib, points.back().resident_bytes >> 20,
                               TokenCountText(length));
    }
  }
  (o.json ? PrintJson : PrintTable)(o, *run, points, out);
  return absl::OkStatus();
}

}  // namespace deltamesh
