// Collects the samples of a core (worker_core.h) and of the process around it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "runtime/cache/sequence_state.h"
#include "runtime/transfer/transport.h"
#include "services/worker/worker_core.h"

namespace deltamesh {

// Not thread-safe.
class MetricList {
 public:
  using Labels = std::vector<std::pair<std::string, std::string>>;

  template <typename Number>
  void Counter(const char* name, const char* help, Number value, Labels labels = {}) {
    Add(MetricSample::Kind::kCounter, name, help, static_cast<double>(value), std::move(labels));
  }
  template <typename Number>
  void Gauge(const char* name, const char* help, Number value, Labels labels = {}) {
    Add(MetricSample::Kind::kGauge, name, help, static_cast<double>(value), std::move(labels));
  }
  void Pools(const StatePools& pools);
  void TransportUse(const Transport& transport);

  std::vector<MetricSample> Take() { return std::exchange(samples_, {}); }

 private:
  void Add(MetricSample::Kind kind, const char* name, const char* help, double value,
           Labels labels);
  std::vector<MetricSample> samples_;
};

}  // namespace deltamesh
