#include "services/worker/engine_steps.h"

#include <algorithm>

namespace deltamesh {

std::optional<StepReport> EngineSteps::Step(absl::Time now) {
  if (!engine_->HasWork()) {
    step_time_.reset();
    rate_.Idle();
    prompt_rate_.Idle();
    return std::nullopt;
  }
  rate_.StepBegins(now);
  prompt_rate_.StepBegins(now);
  const absl::Time began = clock_->Now();
  StepReport report = engine_->Step();
  step_time_ = clock_->Now() - began;
  rate_.StepEnded(report.tokens);
  // Small steps are slow for each token: only those say how fast a prompt is that are about as large as its
  // pieces.
  const EngineOptions& o = engine_->options();
  const bool large = report.prompt_tokens * 2 >= std::min(o.step_tokens_max, o.chunk_tokens_max);
  prompt_rate_.StepEnded(large ? report.tokens : 0);
  ++steps_;
  prompt_tokens_ += static_cast<uint64_t>(report.prompt_tokens);
  return report;
}

mesh::Heartbeat EngineSteps::Load(bool draining) const {
  mesh::Heartbeat load;
  load.set_slabs_free(static_cast<uint64_t>(engine_->pools().slabs->free_slots()));
  load.set_latent_blocks_free(static_cast<uint64_t>(engine_->pools().blocks->free_slots()));
  load.set_running(static_cast<uint64_t>(engine_->running()));
  load.set_waiting(static_cast<uint64_t>(engine_->waiting()));
  load.set_waiting_tokens(static_cast<uint64_t>(engine_->waiting_tokens()));
  load.set_tokens_per_second(rate_.value());
  load.set_prompt_tokens_per_second(prompt_rate_.value());
  load.set_draining(draining);
  return load;
}

void EngineSteps::AddMetrics(MetricList& list) const {
  list.Counter("steps_total", "Steps of the engine.", steps_);
  list.Gauge("requests", kHeldHelp, engine_->running(), {{"state", "running"}});
  list.Gauge("requests", kHeldHelp, engine_->waiting(), {{"state", "waiting"}});
  list.Gauge("waiting_tokens", "Prompt tokens not yet computed.", engine_->waiting_tokens());
  list.Gauge("tokens_per_second", "Recent compute rate.", rate_.value());
  list.Pools(engine_->pools());
}

}  // namespace deltamesh
