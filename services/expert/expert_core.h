// The membership of an expert shard. Its work arrives over the transport (runtime/expert) and never touches
// a router, so the core only registers and reports. A draining shard still answers: steps that use it are
// under way elsewhere, and nobody says when the last one ended. It is idle once no call has arrived for
// `quiet` and none is being computed.
//
// See worker_core.h for the rules of a core.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "services/worker/worker_links.h"

namespace deltamesh {

// What has come over the transport so far.
struct ExpertUse {
  uint64_t arrived = 0;  // calls
  int64_t open = 0;      // of them, not yet answered
};

struct ExpertCoreOptions {
  // Longer than a step of an attention worker computes between two of its calls.
  absl::Duration quiet = absl::Milliseconds(500);
};

class ExpertCore final : public WorkerCore {
 public:
  // `use` is asked on each Tick; it must outlive the core.
  ExpertCore(const ExpertCoreOptions& options, mesh::Register registration,
             std::function<ExpertUse()> use)
      : options_(options), use_(std::move(use)), links_(std::move(registration)) {}

  void OnLinkOpened(LinkId link, absl::Time now) override;
  void OnLinkClosed(LinkId link, absl::Time now) override;
  void OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) override;

  bool Step(absl::Time) override { return false; }
  void Tick(absl::Time now) override;
  std::vector<SendToRouter> TakeActions() override { return links_.Take(); }

  void Drain(absl::Time now) override;
  bool Idle() const override { return !draining_ || quiet_; }
  bool Registered() const override { return links_.registered(); }
  std::vector<MetricSample> Metrics() const override { return {}; }

 private:
  const ExpertCoreOptions options_;
  const std::function<ExpertUse()> use_;
  WorkerLinks links_;
  bool draining_ = false;
  uint64_t arrived_ = 0;                        // as of the last tick
  absl::Time last_use_ = absl::InfinitePast();  // the last tick that saw a new or an open call
  bool quiet_ = false;
};

}  // namespace deltamesh
