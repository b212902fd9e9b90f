#include "services/common/metrics.h"

#include <mutex>

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "runtime/base/status.h"

namespace deltamesh {

struct Metrics::Impl {
  explicit Impl(MetricLabels c) : constant(std::move(c)) {}

  MetricLabels constant;
  // Merge: asking twice for a family gives the one that is there.
  prometheus::Registry registry{prometheus::Registry::InsertBehavior::Merge};
};

Metrics::Metrics(MetricLabels constant) : impl_(std::make_unique<Impl>(std::move(constant))) {}
Metrics::~Metrics() = default;

namespace {

void CheckName(const std::string& name) {
  CHECK(name.rfind("deltamesh_", 0) == 0, "series \"%s\" does not start with deltamesh_", name);
}

}  // namespace

prometheus::Counter& Metrics::Counter(const std::string& name, const std::string& help,
                                      const MetricLabels& labels) {
  CheckName(name);
  return prometheus::BuildCounter()
      .Name(name)
      .Help(help)
      .Labels(impl_->constant)
      .Register(impl_->registry)
      .Add(labels);
}

prometheus::Gauge& Metrics::Gauge(const std::string& name, const std::string& help,
                                  const MetricLabels& labels) {
  CheckName(name);
  return prometheus::BuildGauge()
      .Name(name)
      .Help(help)
      .Labels(impl_->constant)
      .Register(impl_->registry)
      .Add(labels);
}

prometheus::Histogram& Metrics::Histogram(const std::string& name, const std::string& help,
                                          const std::vector<double>& buckets,
                                          const MetricLabels& labels) {
  CheckName(name);
  return prometheus::BuildHistogram()
      .Name(name)
      .Help(help)
      .Labels(impl_->constant)
      .Register(impl_->registry)
      .Add(labels, prometheus::Histogram::BucketBoundaries(buckets));
}

std::string Metrics::Expose() const {
  return prometheus::TextSerializer().Serialize(impl_->registry.Collect());
}

const std::vector<double>& LatencyBuckets() {
  static const std::vector<double> kBuckets = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                               0.5,   1,      2.5,   5,    10,    30,   60,  120};
  return kBuckets;
}

void CounterFollower::Set(double value) {
  if (value > last_) counter_.Increment(value - last_);
  last_ = value;
}

}  // namespace deltamesh
