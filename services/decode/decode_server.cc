#include "services/decode/decode_server.h"

#include <memory>

#include "runtime/base/status.h"
#include "services/decode/decode_core.h"
#include "services/worker/state_transfers.h"
#include "services/worker/worker_process.h"

namespace deltamesh {
namespace {

absl::StatusOr<int> Serve(const AttentionFlags& flags, const SignalWaiter& signals) {
  ASSIGN_OR_RETURN(auto process, AttentionProcess::Start("decode", flags, signals));
  AttentionWorker& worker = process->worker();
  std::unique_ptr<StateWorkerCore> core;
  StateTransfers transfers(process.get(), &core);
  DecodeOptions options;
  options.requests_max = flags.requests;
  options.cache = worker.cache();
  options.tier = worker.tier();
  options.fetch = worker.fetch_options();
  core = std::make_unique<DecodeCore>(options, worker.MakeRegister(mesh::ROLE_DECODE),
                                      &worker.engine(), transfers.ends(),
                                      [&](const mesh::MeshView& view) { worker.SetView(view); });
  return transfers.Run({{"hand-offs per request", std::to_string(options.handoffs_max)}});
}

}  // namespace

int RunDecode(AttentionFlags flags) {
  return RunWorker("decode", flags.worker,
                   [&](const SignalWaiter& signals) { return Serve(flags, signals); });
}

}  // namespace deltamesh
