#include "services/cli/bench_router.h"

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/cli/bench_rows.h"

namespace deltamesh {

void AddRouterBenchFlags(CLI::App* app, RouterBenchOptions* o) {
  app->add_option("--model", o->model, "checkpoint folder; only its text files are read")
      ->envname("DELTAMESH_MODEL")
      ->required();
  const auto count = [app](const char* name, auto& value, const char* help) {
    app->add_option(name, value, help)->check(CLI::PositiveNumber)->capture_default_str();
  };
  count("--index-blocks", o->index_blocks, "blocks in the index");
  count("--prompt-tokens", o->prompt_tokens, "of a prompt");
  count("--answer-tokens", o->answer_tokens, "of an answer");
  count("--requests", o->requests, "requests measured of each kind");
  count("--together", o->together, "requests at once, of the kind that is not alone");
  count("--idle-workers", o->idle_workers, "workers registered with the idle router");
  count("--idle-seconds", o->idle_seconds, "that it is watched");
  app->add_option("--token-gap-ms", o->token_gap_ms, "milliseconds between tokens of the worker")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_flag("--json", o->json, "JSON instead of the table");
}

absl::Status RunRouterBench(const RouterBenchOptions& options, std::ostream& out) {
  InitLog("bench-router", LogLevel::kWarning);
  std::vector<RouterFigure> figures = MeasureIndex(options);
  ASSIGN_OR_RETURN(const std::vector<RouterFigure> process, MeasureRouterProcess(options));
  figures.insert(figures.end(), process.begin(), process.end());
  nlohmann::ordered_json all;
  for (const RouterFigure& f : figures) {
    if (options.json) {
      nlohmann::ordered_json& j = all[f.name] = {{"value", f.value}, {"unit", f.unit}};
      if (f.bar > 0) j.update({{"bar", f.bar}, {"met", f.met()}});
      continue;
    }
    out << absl::StrFormat("%-34s %12.4g %-14s ", f.name, f.value, f.unit);
    if (f.bar > 0) out << absl::StrFormat("%s %.4g", f.at_least ? ">=" : "<=", f.bar);
    out << (f.met() ? "\n" : "  MISSED\n");
  }
  if (options.json) out << JsonText({{"router", std::move(all)}});
  out << std::flush;
  return absl::OkStatus();
}

}  // namespace deltamesh
