#include "services/decode/decode_server.h"

#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_receiver.h"
#include "services/decode/decode_core.h"
#include "services/worker/model_loading.h"
#include "services/worker/worker_host.h"

namespace deltamesh {
namespace {

absl::StatusOr<int> Serve(AttentionFlags flags, const SignalWaiter& signals) {
  RETURN_IF_ERROR(FinishWorkerFlags("decode", &flags.worker));
  ASSIGN_OR_RETURN(auto transport, OpenUcx(flags.worker));
  SystemClock clock;
  SystemEntropy entropy;
  WorkerHostOptions host_options;
  host_options.role = "decode";
  host_options.flags = flags.worker;
  ASSIGN_OR_RETURN(auto host, WorkerHost::Start(host_options, &signals, &clock));
  ASSIGN_OR_RETURN(auto worker, AttentionWorker::Create(flags, std::move(transport)));

  std::unique_ptr<DecodeCore> core;
  HandoffReceiverOptions options;
  options.name = flags.worker.name;
  options.epoch = worker->epoch();
  options.identity = worker->identity();
  options.layout = worker->model().state_layout();
  options.idle_max = absl::Seconds(flags.handoff_seconds);
  HandoffReceiver receiver(
      &worker->transport(), &clock, &entropy, options, [&](HandoffEvent event) {
        // A closure must be copyable; an event owns a state.
        auto shared = std::make_shared<HandoffEvent>(std::move(event));
        host->Post(
            [&core, shared](absl::Time now) { core->OnHandoffEvent(std::move(*shared), now); });
      });
  DecodeOptions core_options;
  core_options.requests_max = flags.requests;
  core = std::make_unique<DecodeCore>(core_options, worker->MakeRegister(mesh::ROLE_DECODE),
                                      &worker->engine(), &receiver,
                                      [&](const mesh::MeshView& view) { worker->SetView(view); });
  auto lines = worker->Describe();
  for (auto& line : DescribeHost(host_options)) lines.push_back(std::move(line));
  lines.emplace_back("hand-offs open", std::to_string(options.transfers_max));
  lines.emplace_back("hand-offs per request", std::to_string(core_options.handoffs_max));
  PrintConfiguration("deltamesh decode", lines);

  WorkerHost::Role role;
  role.core = core.get();
  role.transport = &worker->transport();
  role.ready = [&] { return worker->ExpertsReady(); };
  role.metrics = [&] { return worker->Metrics(); };
  const int code = host->Run(role);
  core.reset();
  worker->StopTransport();
  return code;
}

}  // namespace

int RunDecode(AttentionFlags flags) {
  const SignalWaiter signals;
  InitLog("decode", ParseLogLevel(flags.worker.log_level));
  if (flags.worker.parent != 0) DieWithParent(static_cast<pid_t>(flags.worker.parent));
  absl::StatusOr<int> code = Serve(std::move(flags), signals);
  if (code.ok()) return *code;
  LogError("decode.failed_to_start", {{"error", code.status().ToString()}});
  return 1;
}

}  // namespace deltamesh
