#include "services/decode/decode_server.h"

#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_receiver.h"
#include "services/decode/decode_core.h"
#include "services/worker/attention_process.h"
#include "services/worker/worker_process.h"

namespace deltamesh {
namespace {

absl::StatusOr<int> Serve(const AttentionFlags& flags, const SignalWaiter& signals) {
  ASSIGN_OR_RETURN(auto process, AttentionProcess::Start("decode", flags, signals));
  AttentionWorker& worker = process->worker();
  SystemEntropy entropy;
  std::unique_ptr<DecodeCore> core;
  HandoffReceiverOptions options;
  options.name = process->flags().worker.name;
  options.epoch = worker.epoch();
  options.identity = worker.identity();
  options.layout = worker.model().state_layout();
  options.idle_max = absl::Seconds(flags.handoff_seconds);
  HandoffReceiver receiver(
      &worker.transport(), process->clock(), &entropy, options, [&](HandoffEvent event) {
        // A closure must be copyable; an event owns a state.
        auto shared = std::make_shared<HandoffEvent>(std::move(event));
        process->host().Post(
            [&core, shared](absl::Time now) { core->OnHandoffEvent(std::move(*shared), now); });
      });
  DecodeOptions core_options;
  core_options.requests_max = flags.requests;
  core_options.cache = worker.cache();
  core_options.tier = worker.tier();
  core = std::make_unique<DecodeCore>(core_options, worker.MakeRegister(mesh::ROLE_DECODE),
                                      &worker.engine(), &receiver,
                                      [&](const mesh::MeshView& view) { worker.SetView(view); });
  const int code = process->Run(
      core.get(), {{"hand-offs open", std::to_string(options.transfers_max)},
                   {"landing-unclaimed-seconds",
                    absl::StrFormat("%g", absl::ToDoubleSeconds(options.unclaimed_max))},
                   {"hand-offs per request", std::to_string(core_options.handoffs_max)}});
  core.reset();
  worker.StopTransport();
  return code;
}

}  // namespace

int RunDecode(AttentionFlags flags) {
  return RunWorker("decode", flags.worker,
                   [&](const SignalWaiter& signals) { return Serve(flags, signals); });
}

}  // namespace deltamesh
