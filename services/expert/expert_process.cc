#include "services/expert/expert_process.h"

#include <algorithm>

#include "CLI/CLI.hpp"
#include "absl/strings/str_join.h"
#include "runtime/base/status.h"
#include "runtime/expert/expert_server.h"
#include "runtime/model/config.h"
#include "runtime/text/text_digest.h"
#include "services/expert/expert_core.h"
#include "services/worker/metric_list.h"
#include "services/worker/model_loading.h"
#include "services/worker/worker_host.h"
#include "services/worker/worker_process.h"

namespace deltamesh {
namespace {

absl::StatusOr<std::vector<int32_t>> HostedExperts(const ExpertFlags& flags,
                                                   const ModelConfig& config) {
  if (config.experts == 0) {
    return InvalidArgument("--model: %s has no routed experts; start no expert shard for it",
                           flags.worker.model);
  }
  if (flags.shard < 0 || flags.shard >= flags.shards || flags.shards > config.experts) {
    return InvalidArgument("--shard: %d of %d; use 0 <= shard < shards <= %d experts", flags.shard,
                           flags.shards, config.experts);
  }
  std::vector<int32_t> experts = flags.experts;
  if (experts.empty()) {
    for (int64_t e = flags.shard; e < config.experts; e += flags.shards) {
      experts.push_back(static_cast<int32_t>(e));
    }
  }
  std::sort(experts.begin(), experts.end());
  experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  if (experts.front() < 0 || experts.back() >= config.experts) {
    return InvalidArgument("--expert-ids: %d to %d; the model has experts 0 to %d", experts.front(),
                           experts.back(), config.experts - 1);
  }
  return experts;
}

std::vector<MetricSample> ExpertMetrics(const ExpertServer& server, const Model& model,
                                        size_t experts) {
  const ExpertServerStats s = server.stats();
  MetricList list;
  list.Gauge("model_weight_bytes", "Resident bytes of packed weights.", model.weight_bytes());
  list.Gauge("experts_hosted", "Experts held here, in every MoE layer.", experts);
  list.Counter("expert_calls_total", "Calls answered with rows.", s.calls);
  list.Counter("expert_rows_total", "Rows received in answered calls.", s.rows);
  list.Counter("expert_computed_rows_total", "Rows times experts computed.", s.expert_rows);
  const char* refused = "Calls refused or lost, by cause.";
  list.Counter("expert_call_failures_total", refused, s.malformed, {{"cause", "malformed"}});
  list.Counter("expert_call_failures_total", refused, s.stale, {{"cause", "stale"}});
  list.Counter("expert_call_failures_total", refused, s.full, {{"cause", "full"}});
  list.Counter("expert_call_failures_total", refused, s.corrupt, {{"cause", "corrupt"}});
  list.Counter("expert_call_failures_total", refused, s.lost, {{"cause", "lost"}});
  list.Gauge("expert_queued_calls", "Calls accepted and not yet answered.", s.queued);
  list.Gauge("expert_landing_bytes", "Bytes of rows and answers held.", s.landing_bytes);
  return list.Take();
}

absl::StatusOr<int> Serve(ExpertFlags flags, const SignalWaiter& signals) {
  RETURN_IF_ERROR(FinishWorkerFlags("expert", &flags.worker));
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(flags.worker.model));
  ASSIGN_OR_RETURN(const std::string text_digest, TextDigest(flags.worker.model));
  ASSIGN_OR_RETURN(const std::vector<int32_t> experts, HostedExperts(flags, config));
  ASSIGN_OR_RETURN(auto transport, OpenUcx(flags.worker));
  SystemClock clock;
  WorkerHostOptions host_options;
  host_options.role = "expert";
  host_options.flags = flags.worker;
  ASSIGN_OR_RETURN(auto host, WorkerHost::Start(host_options, &signals, &clock));
  ExpertSelection selection;
  selection.kind = ExpertSelection::Kind::kList;
  selection.experts = experts;
  ASSIGN_OR_RETURN(auto model, LoadModel(flags.worker, selection, /*only_experts=*/true));

  ThreadPool pool(flags.worker.threads, absl::Microseconds(flags.worker.spin_us));
  ExpertServerOptions options;
  options.name = flags.worker.name;
  options.epoch = static_cast<uint64_t>(absl::ToUnixNanos(clock.Now()));
  options.model_digest = model->digest();
  options.landing_bytes_max = flags.landing_bytes;
  options.queue_max = flags.queue;
  ExpertServer server(transport.get(), &model->experts(), &pool, options);

  mesh::Register registration;
  registration.set_name(flags.worker.name);
  registration.set_role(mesh::ROLE_EXPERT);
  registration.set_epoch(options.epoch);
  *registration.mutable_model() = MakeModelIdentity(model->digest(), text_digest);
  registration.set_transport_address(transport->address());
  registration.set_transport_kind(transport->kind());
  registration.mutable_experts()->set_shard(static_cast<uint32_t>(flags.shard));
  registration.mutable_experts()->set_shards(static_cast<uint32_t>(flags.shards));
  for (int32_t e : experts) registration.mutable_experts()->add_experts(static_cast<uint32_t>(e));
  const ExpertCoreOptions core_options;
  ExpertCore core(core_options, std::move(registration), [&server] {
    const ExpertServerStats stats = server.stats();
    return ExpertUse{.arrived = stats.arrived, .open = stats.queued};
  });

  auto lines = DescribeWorker(flags.worker);
  lines.emplace_back("shard", absl::StrFormat("%d of %d", flags.shard, flags.shards));
  lines.emplace_back("experts", absl::StrFormat("%d of %d", experts.size(), config.experts));
  lines.emplace_back("landing-bytes", std::to_string(flags.landing_bytes));
  lines.emplace_back("queue", std::to_string(flags.queue));
  for (auto& line : DescribeHost(host_options)) lines.push_back(std::move(line));
  lines.emplace_back("drain quiet", absl::FormatDuration(core_options.quiet));
  lines.emplace_back("weights resident", absl::StrFormat("%d MiB", model->weight_bytes() >> 20));
  PrintConfiguration("deltamesh expert", lines);

  WorkerHost::Role role;
  role.core = &core;
  role.transport = transport.get();
  role.metrics = [&] { return ExpertMetrics(server, *model, experts.size()); };
  const int code = host->Run(role);
  server.Stop();      // it uses the transport,
  transport.reset();  // which calls it
  return code;
}

}  // namespace

void AddExpertFlags(CLI::App* app, ExpertFlags* f) {
  AddWorkerFlags(app, &f->worker);
  app->add_option("--shard", f->shard, "which shard this is, from 0")->capture_default_str();
  app->add_option("--shards", f->shards, "of how many; expert e lives on shard e % shards")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option("--expert-ids", f->experts, "experts to host: 0,5,17 (default: the shard's)")
      ->delimiter(',');
  app->add_option("--landing-bytes", f->landing_bytes, "bytes of rows and answers held at once")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_option("--queue", f->queue, "calls accepted and not yet answered")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

int RunExpert(ExpertFlags flags) {
  return RunWorker("expert", flags.worker,
                   [&](const SignalWaiter& signals) { return Serve(flags, signals); });
}

}  // namespace deltamesh
