#include "services/cli/plan.h"

#include "CLI/CLI.hpp"
#include "runtime/base/status.h"
#include "services/common/flag_range.h"
#include "services/plan/measured_rates.h"
#include "services/plan/model_shape.h"
#include "services/plan/plan_report.h"

namespace deltamesh {

namespace {

void AddMachineFlags(CLI::App* app, PlanOptions* o) {
  app->add_option("--memory", o->memory_gb, "GB (10^9 bytes) of a worker; 0: not asked")
      ->check(NumberIn(kMemoryRange))
      ->capture_default_str();
  app->add_option("--link", o->link_gb, "GB per second between workers")
      ->check(NumberIn(kLinkRange))
      ->capture_default_str();
  app->add_option(
         "--expert-shards", o->expert_shards,
         "at least so many shards hold the routed experts, and more when their memory, compute, "
         "reading or link asks for it; 0: every worker holds the experts")
      ->check(WholeIn(0, kPlanShardsMax, "shards"))
      ->capture_default_str();
  app->add_option(
         "--expert-tflops", o->expert_tflops,
         "TFLOP per second of an expert worker; 0: as a worker has that reaches --prefill-rate "
         "with all weights in it")
      ->check(NumberIn(kExpertFlopsRange))
      ->capture_default_str();
  app->add_option(
         "--expert-read", o->expert_read_gb,
         "GB of weights per second that an expert worker reads; 0: as a worker that reaches "
         "--decode-rate and --stream-rate with all weights in it")
      ->check(NumberIn(kExpertReadRange))
      ->capture_default_str();
  app->add_option(
         "--router-request-ms", o->router_request_ms,
         "milliseconds of a router's CPU for a request; the defaults of the three are what "
         "deltamesh bench-router measured (tools/bench/README.md)")
      ->check(NumberIn(kRouterRequestRange))
      ->capture_default_str();
  app->add_option("--router-prompt-us", o->router_prompt_us,
                  "microseconds of it for a token of a prompt")
      ->check(NumberIn(kRouterPromptRange))
      ->capture_default_str();
  app->add_option("--router-answer-us", o->router_answer_us,
                  "microseconds of it for a token of an answer")
      ->check(NumberIn(kRouterAnswerRange))
      ->capture_default_str();
  app->add_option("--router-live-requests", o->router_live_requests,
                  "requests that a router admits at once, its --live-requests")
      ->check(WholeIn(1, kRouterLiveMax, "requests"))
      ->capture_default_str();
}

void AddTrafficFlags(CLI::App* app, PlanOptions* o) {
  const auto tokens = WholeIn(1, kPlanTokensMax, "tokens");
  app->add_option("--requests", o->requests, "requests per second; 0: not asked")
      ->check(NumberIn(kRequestsRange))
      ->capture_default_str();
  app->add_option("--input-tokens", o->input_tokens, "mean tokens of a prompt")->check(tokens);
  app->add_option("--uncached-tokens", o->uncached_tokens, "of them, computed anew")->check(tokens);
  app->add_option("--output-tokens", o->output_tokens, "mean tokens of an answer")->check(tokens);
  app->add_option("--rates", o->rates,
                  "what deltamesh bench --json wrote: rates that are not given come from there");
  app->add_option("--prefill-rate", o->prefill_rate, "prompt tokens per second of a worker")
      ->check(NumberIn(kPrefillRange));
  app->add_option("--decode-rate", o->decode_rate,
                  "generated tokens per second of a worker, all sequences together")
      ->check(NumberIn(kDecodeRange));
  app->add_option("--stream-rate", o->stream_rate, "generated tokens per second of one sequence")
      ->check(NumberIn(kStreamRange));
  app->add_option("--step-tokens", o->step_tokens,
                  "prompt tokens in one step of a prefill worker: how often experts are read")
      ->check(tokens)
      ->capture_default_str();
  app->add_option("--utilisation", o->utilisation, "share of a worker's rates that is planned for")
      ->check(NumberIn(kUtilisationRange))
      ->capture_default_str();
}

}  // namespace

void AddPlanFlags(CLI::App* app, PlanOptions* o) {
  app->add_option("config", o->config,
                  "a config.json or its folder; Kimi K3 when nothing is named");
  app->add_option("--latents", o->latents, "type of latents: f32, bf16 or fp8")
      ->capture_default_str();
  app->add_option("--state", o->state, "type of recurrent states: f32, bf16 or fp8")
      ->capture_default_str();
  app->add_option("--conv", o->conv, "type of convolution inputs: f32, bf16 or fp8")
      ->capture_default_str();
  const auto tokens = WholeIn(1, kPlanTokensMax, "tokens");
  app->add_option("--lengths", o->lengths, "tokens of sequences to answer for")
      ->delimiter(',')
      ->check(tokens)
      ->capture_default_str();
  app->add_option("--append-tokens", o->append_tokens, "new tokens of a turn of a known session")
      ->check(WholeIn(0, kPlanTokensMax, "tokens"))
      ->capture_default_str();
  app->add_option("--compare-tokens", o->compare_tokens, "tokens at which attentions are compared")
      ->check(tokens)
      ->capture_default_str();
  app->add_option("--compare-values", o->compare_values, "type of compared keys, values, latents")
      ->capture_default_str();
  app->add_option("--kv-heads", o->kv_heads, "groups of the compared grouped-query attention")
      ->check(WholeIn(1, kKvHeadsMax, "heads"))
      ->capture_default_str();
  app->add_option("--window", o->window, "tokens that the compared sliding window keeps")
      ->check(tokens)
      ->capture_default_str();
  AddMachineFlags(app, o);
  AddTrafficFlags(app, o);
  app->add_flag("--json", o->json, "one JSON document instead of tables");
}

absl::Status RunPlan(const PlanOptions& o, std::ostream& out) {
  ModelShape shape;
  if (o.config.empty()) {
    shape = KimiK3Shape();
  } else {
    ASSIGN_OR_RETURN(shape, LoadModelShape(o.config));
  }
  PlanQuestions q;
  ASSIGN_OR_RETURN(q.widths.latent, BytesOfType("latents", o.latents));
  ASSIGN_OR_RETURN(q.widths.state, BytesOfType("state", o.state));
  ASSIGN_OR_RETURN(q.widths.conv, BytesOfType("conv", o.conv));
  ASSIGN_OR_RETURN(q.variants.value_bytes, BytesOfType("compare-values", o.compare_values));
  q.variants.tokens = o.compare_tokens;
  q.variants.groups = o.kv_heads;
  q.variants.window = o.window;
  q.lengths = o.lengths;
  q.append_tokens = o.append_tokens;
  q.machine.memory_bytes = o.memory_gb * 1e9;
  q.machine.link_bytes_per_second = o.link_gb * 1e9;
  q.machine.expert_shards = o.expert_shards;
  q.machine.expert_flops_per_second = o.expert_tflops * 1e12;
  q.machine.expert_read_bytes_per_second = o.expert_read_gb * 1e9;
  q.router = {.request_seconds = o.router_request_ms / 1e3,
              .prompt_token_seconds = o.router_prompt_us / 1e6,
              .answer_token_seconds = o.router_answer_us / 1e6,
              .live_requests = o.router_live_requests};
  q.traffic = {.requests_per_second = o.requests,
               .input_tokens = o.input_tokens,
               .uncached_tokens = o.uncached_tokens,
               .output_tokens = o.output_tokens,
               .prefill_tokens_per_second = o.prefill_rate,
               .decode_tokens_per_second = o.decode_rate,
               .stream_tokens_per_second = o.stream_rate,
               .step_tokens = o.step_tokens,
               .utilisation = o.utilisation};
  if (!o.rates.empty()) {
    ASSIGN_OR_RETURN(const MeasuredRates measured, ReadMeasuredRates(o.rates));
    PlannedTraffic& t = q.traffic;
    if (t.prefill_tokens_per_second == 0) t.prefill_tokens_per_second = measured.prefill;
    if (t.decode_tokens_per_second == 0) t.decode_tokens_per_second = measured.decode;
    if (t.stream_tokens_per_second == 0) t.stream_tokens_per_second = measured.stream;
  }
  ASSIGN_OR_RETURN(const nlohmann::ordered_json document, PlanDocument(shape, q));
  if (o.json) {
    // A path need not be UTF-8.
    out << document.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  } else {
    PrintPlan(document, out);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
