// Coding agents at work: long sessions that append, now and then cut their tail, or compact.
//
// The distributions are those of 710 public sessions of coding agents (48,658 requests), given by their
// quantiles; see the tables in the source.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "services/simulate/traffic.h"

namespace deltamesh {

struct AgentTrafficOptions {
  uint64_t seed = 1;
  int64_t sessions = 710;
  double day_seconds = 86400;        // sessions begin evenly over it
  int64_t context_tokens = 1048576;  // a longer prompt is compacted first
  int64_t variants = 20;             // of tools and system text
};

class AgentTraffic final : public Traffic {
 public:
  explicit AgentTraffic(const AgentTrafficOptions& options);
  ~AgentTraffic() override;

  std::optional<double> NextAt() const override;
  Turn Next() override;
  void Finished(const Turn& turn, double now) override;

 private:
  struct Session;
  using Due = std::pair<double, uint64_t>;  // time, session

  const AgentTrafficOptions options_;
  std::vector<std::unique_ptr<Session>> sessions_;  // by number; null: over, or not begun
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
};

}  // namespace deltamesh
