// The membership of an expert shard. Its work arrives over the transport (runtime/expert) and never touches
// a router, so the core only registers and reports.
//
// See worker_core.h for the rules of a core.
#pragma once

#include <vector>

#include "services/worker/worker_links.h"

namespace deltamesh {

class ExpertCore final : public WorkerCore {
 public:
  explicit ExpertCore(mesh::Register registration) : links_(std::move(registration)) {}

  void OnLinkOpened(LinkId link, absl::Time now) override;
  void OnLinkClosed(LinkId link, absl::Time now) override;
  void OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) override;

  bool Step(absl::Time) override { return false; }
  void Tick(absl::Time now) override;
  std::vector<SendToRouter> TakeActions() override { return links_.Take(); }

  void Drain(absl::Time now) override;
  bool Idle() const override { return true; }
  bool Registered() const override { return links_.registered(); }
  std::vector<MetricSample> Metrics() const override { return {}; }

 private:
  WorkerLinks links_;
  bool draining_ = false;
};

}  // namespace deltamesh
