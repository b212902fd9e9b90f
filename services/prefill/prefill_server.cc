#include "services/prefill/prefill_server.h"

#include <memory>

#include "runtime/base/status.h"
#include "services/prefill/prefill_core.h"
#include "services/worker/state_transfers.h"
#include "services/worker/worker_process.h"

namespace deltamesh {
namespace {

absl::StatusOr<int> Serve(const AttentionFlags& flags, const SignalWaiter& signals) {
  ASSIGN_OR_RETURN(auto process, AttentionProcess::Start("prefill", flags, signals));
  AttentionWorker& worker = process->worker();
  std::unique_ptr<StateWorkerCore> core;
  StateTransfers transfers(process.get(), &core);
  PrefillOptions options;
  options.requests_max = flags.requests;
  options.clock = process->clock();
  options.kda_index = KdaIndexOfLayers(worker.model().config());
  options.cache = worker.cache();
  options.tier = worker.tier();
  options.fetch = worker.fetch_options();
  core = std::make_unique<PrefillCore>(std::move(options), worker.MakeRegister(mesh::ROLE_PREFILL),
                                       &worker.engine(), transfers.ends(),
                                       [&](const mesh::MeshView& view) { worker.SetView(view); });
  return transfers.Run({});
}

}  // namespace

AttentionFlags PrefillDefaults() {
  AttentionFlags flags;
  flags.engine.chunk_tokens_max = flags.engine.step_tokens_max;
  return flags;
}

int RunPrefill(AttentionFlags flags) {
  return RunWorker("prefill", flags.worker,
                   [&](const SignalWaiter& signals) { return Serve(flags, signals); });
}

}  // namespace deltamesh
