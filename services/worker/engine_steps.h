// An attention worker's engine as its core drives it: steps, and what they and the engine's queues and pools
// amount to in heartbeats and metrics.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/base/clock.h"
#include "runtime/engine/engine.h"
#include "services/worker/metric_list.h"
#include "services/worker/rate.h"

namespace deltamesh {

// Of the series `requests`, to which each role adds the states of its own.
inline constexpr char kHeldHelp[] = "Requests held, by state.";

// Not thread-safe: part of a core.
class EngineSteps {
 public:
  // Not owned; must outlive this. `clock` is for step_time alone; null: the system's.
  explicit EngineSteps(Engine* engine, const Clock* clock = nullptr)
      : engine_(engine), clock_(clock != nullptr ? clock : &system_clock_) {}
  EngineSteps(const EngineSteps&) = delete;
  EngineSteps& operator=(const EngineSteps&) = delete;

  // One step, begun at `now`; nullopt when there was nothing to do.
  std::optional<StepReport> Step(absl::Time now);
  // How long the engine took in the last Step: what a core does around it does not count. nullopt when there
  // was nothing to do.
  std::optional<absl::Duration> step_time() const { return step_time_; }

  uint64_t prompt_tokens() const { return prompt_tokens_; }                 // computed so far
  double prompt_tokens_per_second() const { return prompt_rate_.value(); }  // 0: not known
  mesh::Heartbeat Load(bool draining) const;
  void AddMetrics(MetricList& list) const;

 private:
  Engine* const engine_;
  const SystemClock system_clock_;
  const Clock* const clock_;
  std::optional<absl::Duration> step_time_;
  TokenRate rate_, prompt_rate_;
  uint64_t steps_ = 0, prompt_tokens_ = 0;
};

}  // namespace deltamesh
