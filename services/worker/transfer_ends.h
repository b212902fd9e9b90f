// This worker's ends of the transfers of state, as its core is given them. Whatever the role: what one sends
// another may fetch.
#pragma once

#include "runtime/transfer/fetch_port.h"
#include "runtime/transfer/handoff_receiver.h"
#include "runtime/transfer/handoff_sender.h"
#include "services/worker/worker_core.h"

namespace deltamesh {

// Not owned; must outlive the core.
struct TransferEnds {
  HandoffSender* sender = nullptr;
  HandoffReceiver* receiver = nullptr;
  FetchPort* fetch = nullptr;
};

// A core that is told how transfers end, and how fast they can be.
class StateWorkerCore : public WorkerCore {
 public:
  virtual void OnHandoffSent(const HandoffSent& result, absl::Time now) = 0;
  virtual void OnHandoffEvent(HandoffEvent event, absl::Time now) = 0;
  virtual void OnFetchEvent(const FetchEvent& event, absl::Time now) = 0;
  // How fast this worker's connection to another one is, which it opened to hand over.
  virtual void OnConnectionMeasured(const std::string& to, uint64_t epoch,
                                    double bytes_per_second) = 0;
};

}  // namespace deltamesh
