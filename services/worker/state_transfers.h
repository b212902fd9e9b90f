// A prefill or decode worker's ends of the transfers of state, put on its transport: they tell the core, on
// its thread, what happens, and somebody speaks for the sender while that thread computes.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/random.h"
#include "services/worker/attention_process.h"
#include "services/worker/connection_meter.h"
#include "services/worker/transfer_ends.h"

namespace deltamesh {

// Of the main thread. Must outlive the process's transport.
class StateTransfers {
 public:
  // `core` may be filled in later, before Run.
  StateTransfers(AttentionProcess* process, std::unique_ptr<StateWorkerCore>* core);
  ~StateTransfers();
  StateTransfers(const StateTransfers&) = delete;
  StateTransfers& operator=(const StateTransfers&) = delete;

  TransferEnds ends() const { return {sender_.get(), receiver_.get(), fetch_.get()}; }
  // Serves until the process is to end, then ends the core and the transport. `bounds` are the role's own.
  int Run(std::vector<std::pair<std::string, std::string>> bounds);

 private:
  AttentionProcess* const process_;
  std::unique_ptr<StateWorkerCore>* const core_;
  HandoffSenderOptions sending_;
  HandoffReceiverOptions receiving_;
  SystemEntropy entropy_;
  std::unique_ptr<ConnectionMeter> meter_;
  std::unique_ptr<HandoffSender> sender_;
  std::unique_ptr<HandoffReceiver> receiver_;
  std::unique_ptr<FetchPort> fetch_;
};

}  // namespace deltamesh
