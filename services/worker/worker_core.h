// The logic of a worker process, whatever its role: messages and times in, messages out. No threads, no
// clock, no gRPC, so that tests host a whole mesh in one thread.
//
// Not thread-safe: one thread owns a core. Times never go backwards.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "services/common/link.h"

namespace deltamesh {

struct SendToRouter {
  LinkId link = 0;
  mesh::WorkerMessage message;
};

// One number for /metrics. Counters only grow. Names have the unit as suffix and no prefix.
struct MetricSample {
  enum class Kind { kCounter, kGauge } kind;
  std::string name, help;
  std::vector<std::pair<std::string, std::string>> labels;
  double value = 0;
};

class WorkerCore {
 public:
  virtual ~WorkerCore() = default;

  // The router accepted a stream; the core registers on it. A closed link frees everything of it.
  virtual void OnLinkOpened(LinkId link, absl::Time now) = 0;
  virtual void OnLinkClosed(LinkId link, absl::Time now) = 0;
  virtual void OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) = 0;

  // One step of the engine, and a bounded part of what is to be done between two of them; false when there
  // was nothing to do.
  virtual bool Step(absl::Time now) = 0;
  // How long the engine took within the last Step; nullopt: it had nothing to do, or there is none.
  virtual std::optional<absl::Duration> StepTime() const { return std::nullopt; }
  // Deadlines and heartbeats. Call at least every 100 ms.
  virtual void Tick(absl::Time now) = 0;
  // What to send, in order.
  virtual std::vector<SendToRouter> TakeActions() = 0;

  // Refuses new requests from now on and says so in heartbeats.
  virtual void Drain(absl::Time now) = 0;
  // Holds no request.
  virtual bool Idle() const = 0;
  // Some router accepted the registration.
  virtual bool Registered() const = 0;
  virtual std::vector<MetricSample> Metrics() const = 0;
};

}  // namespace deltamesh
