#include "services/cli/simulate.h"

#include <chrono>

#include "CLI/CLI.hpp"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "services/common/flag_range.h"
#include "services/simulate/disaggregation.h"

namespace deltamesh {

void AddSimulateFlags(CLI::App* app, SimulateOptions* o) {
  SimulationOptions& s = o->simulation;
  app->add_option("--model", s.config,
                  "a config.json or its folder; Kimi K3 when nothing is named");
  app->add_option("--latents", o->latents, "type of latents: f32, bf16 or fp8")
      ->capture_default_str();
  app->add_option("--state", o->state, "type of recurrent states: f32, bf16 or fp8")
      ->capture_default_str();
  app->add_option("--conv", o->conv, "type of convolution inputs: f32, bf16 or fp8")
      ->capture_default_str();
  app->add_option("--traffic", s.traffic,
                  "agents, documents, unique (documents that nobody asks about again), chats, or a "
                  "file of JSON lines in Mooncake's format")
      ->capture_default_str();
  app->add_option("--seed", s.seed, "of the traffic; the same one gives the same report")
      ->capture_default_str();
  app->add_option("--sessions", s.sessions, "sessions of agents")
      ->check(WholeIn(1, kSessionsMax, "sessions"))
      ->capture_default_str();
  app->add_option("--requests", s.requests, "requests about documents")
      ->check(WholeIn(1, kDocumentRequestsMax, "requests"))
      ->capture_default_str();
  app->add_option("--chats", s.chats, "short chats")
      ->check(WholeIn(1, kSessionsMax, "chats"))
      ->capture_default_str();
  app->add_option("--hours", s.hours, "over which sessions begin or requests come")
      ->check(NumberIn(kHoursRange))
      ->capture_default_str();
  app->add_option("--policy", s.policies,
                  "bound, ours, two-tails, tail, tail+junction, tail+junction+end, grid:TOKENS; "
                  "default: those of the measured table")
      ->delimiter(',');
  app->add_option("--cache", o->cache_gb, "GB (10^9 bytes) of a worker's prefix cache; 0: no bound")
      ->check(NumberIn(kCacheRange))
      ->capture_default_str();
  app->add_option("--prefill-workers", s.prefill_workers,
                  "prefill workers; none of both kinds: one cache, no queue")
      ->check(WholeIn(0, kVirtualWorkersMax, "workers"))
      ->capture_default_str();
  app->add_option("--decode-workers", s.decode_workers, "decode workers")
      ->check(WholeIn(0, kVirtualWorkersMax, "workers"))
      ->capture_default_str();
  app->add_option("--disaggregate", s.disaggregation,
                  "whether prefill workers compute prompts: planned, always, never, or several")
      ->delimiter(',')
      ->capture_default_str();
  app->add_flag(
      "--compare-disaggregation", o->compare,
      "instead: planned, always and never under three kinds of traffic of their own, light "
      "and busy, over fast and slow links");
  app->add_option("--scale", o->scale, "of how long these last")
      ->check(NumberIn(kScaleRange))
      ->capture_default_str();
  app->add_option("--sequences", s.slabs, "sequences at once on a worker")
      ->check(WholeIn(1, kSequencesMax, "sequences"))
      ->capture_default_str();
  app->add_option("--prompt-rate", s.rates.prompt_tokens_per_second,
                  "prompt tokens per second of a worker")
      ->check(NumberIn(kPromptRateRange))
      ->capture_default_str();
  app->add_option("--step-ms", o->step_ms, "milliseconds of every step, whatever is in it")
      ->check(NumberIn(kStepRange))
      ->capture_default_str();
  app->add_option("--token-ms", o->token_ms,
                  "milliseconds of a step for each sequence that decodes in it")
      ->check(NumberIn(kTokenRange))
      ->capture_default_str();
  app->add_option("--link", o->link_gb, "GB per second between workers")
      ->check(NumberIn(kLinkRange))
      ->capture_default_str();
  app->add_flag("--json", o->json, "one JSON document instead of tables");
}

absl::Status RunSimulate(const SimulateOptions& o, std::ostream& out, std::ostream& log) {
  SimulationOptions s = o.simulation;
  ASSIGN_OR_RETURN(s.widths.latent, BytesOfType("latents", o.latents));
  ASSIGN_OR_RETURN(s.widths.state, BytesOfType("state", o.state));
  ASSIGN_OR_RETURN(s.widths.conv, BytesOfType("conv", o.conv));
  s.cache_bytes = o.cache_gb * 1e9;
  s.link_bytes_per_second = o.link_gb * 1e9;
  s.rates.step_seconds = o.step_ms / 1e3;
  s.rates.token_seconds = o.token_ms / 1e3;
  InitLog("simulate", LogLevel::kError);  // a router tells of every request
  auto before = std::chrono::steady_clock::now();
  const auto progress = [&](const std::string& what, int64_t requests) {
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - before).count();
    before = now;
    log << absl::StrFormat("%s: %d requests in %.1f s, %.0f a second\n", what, requests, seconds,
                           static_cast<double>(requests) / seconds)
        << std::flush;
  };
  if (o.compare) {
    if (s.prefill_workers == 0 && s.decode_workers == 0) s.prefill_workers = s.decode_workers = 4;
    ASSIGN_OR_RETURN(const nlohmann::ordered_json document,
                     CompareDisaggregation({.base = s, .scale = o.scale}, progress));
    if (o.json) {
      out << document.dump(1) << "\n";
    } else {
      PrintDisaggregation(document, out);
    }
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const nlohmann::ordered_json document, Simulate(s, progress));
  if (o.json) {
    // A path need not be UTF-8.
    out << document.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  } else {
    PrintSimulation(document, out);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
