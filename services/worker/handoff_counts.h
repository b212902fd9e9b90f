// What became of the hand-offs at one end of them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "services/worker/metric_list.h"

namespace deltamesh {

// Not thread-safe: part of a core.
class HandoffCounts {
 public:
  void Completed(uint64_t bytes, double seconds) {
    ++completed_;
    bytes_ += bytes;
    seconds_ += seconds;
  }
  void Failed(const std::string& reason) { ++failed_[reason]; }

  // The help of the series that mean different things at the two ends.
  struct Help {
    const char* results;
    const char* seconds;
  };
  void AddMetrics(const Help& help, MetricList& list) const {
    list.Counter("handoffs_total", help.results, completed_, {{"result", "OK"}});
    for (const auto& [reason, count] : failed_) {
      list.Counter("handoffs_total", help.results, count, {{"result", reason}});
    }
    list.Counter("handoff_bytes_total", "Payload of complete hand-offs.", bytes_);
    list.Counter("handoff_seconds_total", help.seconds, seconds_);
  }

 private:
  uint64_t completed_ = 0, bytes_ = 0;
  double seconds_ = 0;
  std::map<std::string, uint64_t> failed_;  // by reason name
};

}  // namespace deltamesh
