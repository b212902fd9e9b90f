// Prometheus series of one process: a thin layer over the client library's registry that keeps
// names, units and histogram buckets uniform. Every series is listed in METRICS.md.
//
// Thread-safe. The references returned live as long as the registry; keep them, a lookup costs far
// more than an update.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
}  // namespace prometheus

namespace deltamesh {

using MetricLabels = std::map<std::string, std::string>;

class Metrics {
 public:
  // `constant` labels are put on every series, for example {"role", "decode"}.
  explicit Metrics(MetricLabels constant);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // `name` starts with "deltamesh_" and ends with its unit (counters: "_total"). The same name and
  // labels give the same series. A bad name is a CHECK failure.
  prometheus::Counter& Counter(const std::string& name, const std::string& help,
                               const MetricLabels& labels = {});
  prometheus::Gauge& Gauge(const std::string& name, const std::string& help,
                           const MetricLabels& labels = {});
  // `buckets`: ascending upper bounds, without +Inf.
  prometheus::Histogram& Histogram(const std::string& name, const std::string& help,
                                   const std::vector<double>& buckets,
                                   const MetricLabels& labels = {});

  // Text exposition format 0.0.4.
  std::string Expose() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Bounds that suit waits from a millisecond to two minutes.
const std::vector<double>& LatencyBuckets();

// Makes a counter follow a number that only grows and is kept elsewhere.
class CounterFollower {
 public:
  explicit CounterFollower(prometheus::Counter& counter) : counter_(counter) {}
  void Set(double value);

 private:
  prometheus::Counter& counter_;
  double last_ = 0;
};

}  // namespace deltamesh
