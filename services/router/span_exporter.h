// Sends spans of requests to an OpenTelemetry collector, in batches, on a thread of its own.
//
// Nothing waits for it: spans that come while as many wait as may are dropped, and so is a batch that the
// collector has not taken after kTriesMax tries. Both are counted, and the log says when sending began to
// fail and when it went well again.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "otlp/trace_export.grpc.pb.h"
#include "services/common/metrics.h"
#include "services/router/request_span.h"

namespace deltamesh {

struct SpanExporterOptions {
  std::string endpoint;                    // host:port of OTLP over gRPC, no TLS; empty: nowhere
  std::string router;                      // service.instance.id
  size_t queue_max = 4096;                 // spans that wait
  size_t batch_max = 256;                  // of one call
  absl::Duration fill = absl::Seconds(1);  // longest wait of a batch that is not full
  absl::Duration call_max = absl::Seconds(2);     // of one try
  absl::Duration retry_after = absl::Seconds(1);  // doubled for the next try
};

class SpanExporter {
 public:
  static constexpr int kTriesMax = 3;

  // `metrics` must outlive this.
  SpanExporter(SpanExporterOptions options, Metrics* metrics);
  // Sends what waits, with one try each; takes call_max for what runs and as long again for the rest.
  ~SpanExporter();
  SpanExporter(const SpanExporter&) = delete;
  SpanExporter& operator=(const SpanExporter&) = delete;

  // Of a request whose client does not record its trace: nothing.
  void Add(const Decision& decision);

 private:
  using Spans = std::vector<otlp::Span>;

  void Loop();
  bool Full() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return stop_ || waiting_.size() >= options_.batch_max;
  }
  bool Any() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stop_ || !waiting_.empty(); }
  bool Stopping() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stop_; }
  // Tries until it is taken; `last`: once. How many spans the collector refused is told in `rejected`.
  absl::Status Send(Spans spans, bool last, absl::Time give_up, int64_t* rejected);
  void Count(size_t spans, const absl::Status& sent, int64_t rejected);

  const SpanExporterOptions options_;
  const std::unique_ptr<otlp::TraceService::Stub> stub_;
  prometheus::Counter &exported_, &dropped_, &failed_;
  bool failing_ = false;  // by the thread
  absl::Mutex mu_;
  Spans waiting_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace deltamesh
