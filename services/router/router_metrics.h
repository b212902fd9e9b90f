// The router's series. Names, units and labels are listed in services/common/METRICS.md.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "services/common/metrics.h"
#include "services/router/router_core.h"

namespace deltamesh {

// Used by one thread.
class RouterMetrics {
 public:
  explicit RouterMetrics(Metrics* metrics);  // must outlive this

  void Accepted(int64_t prompt_tokens);
  void Ended(absl::StatusCode code, absl::Duration after);
  void FirstToken(absl::Duration after);
  void NextTokens(absl::Duration gap, int64_t tokens);
  void Generated(int64_t tokens);
  void Fetched(const FetchSeen& fetch);
  // Follows the core's own counts.
  void Update(const RouterCounters& counters, const RouterGauges& gauges, bool ready,
              size_t mailbox);

 private:
  CounterFollower& Follow(const std::string& name, const std::string& help,
                          const MetricLabels& labels = {});
  struct Fetches {
    prometheus::Histogram* seconds = nullptr;
    prometheus::Histogram* bytes = nullptr;
  };
  Fetches& FetchesOf(const std::string& reason);

  Metrics* const metrics_;
  std::map<absl::StatusCode, prometheus::Counter*> ended_;
  std::map<std::string, CounterFollower> followers_;  // by name and label value
  std::map<std::string, Fetches> fetches_;            // by reason
  prometheus::Counter& prompt_tokens_;
  prometheus::Counter& generated_tokens_;
  prometheus::Histogram& ttft_;
  prometheus::Histogram& itl_;
  prometheus::Histogram& request_;
  prometheus::Gauge& waiting_;
  prometheus::Gauge& waiting_cost_;
  prometheus::Gauge& tenants_;
  prometheus::Gauge& drain_;
  prometheus::Gauge& live_;
  prometheus::Gauge& mailbox_;
  prometheus::Gauge& ready_;
  prometheus::Gauge& prefill_;
  prometheus::Gauge& decode_;
  prometheus::Gauge& expert_;
  prometheus::Gauge& prefix_blocks_;
  prometheus::Gauge& prefix_objects_;
  prometheus::Gauge& prefix_bytes_;
  prometheus::Gauge& links_measured_;
  prometheus::Gauge& prefix_unknown_;
  prometheus::Gauge& sessions_;
  prometheus::Gauge& session_bytes_;
  prometheus::Gauge& session_calls_;
  prometheus::Gauge& sessions_unsettled_;
  prometheus::Gauge& stores_;
  prometheus::Gauge& stores_away_;
};

}  // namespace deltamesh
