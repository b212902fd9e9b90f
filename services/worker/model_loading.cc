#include "services/worker/model_loading.h"

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/ucx_transport.h"
#include "services/common/process.h"

namespace deltamesh {

absl::StatusOr<std::unique_ptr<Transport>> OpenUcx(const WorkerFlags& flags) {
  RestoreCrashSignals();
  UcxTransportOptions options;
  ASSIGN_OR_RETURN(auto listen, ParseHostPort("--transport-listen", flags.transport_listen));
  options.host = listen.first;
  options.port = listen.second;
  options.advertise_host = flags.transport_advertise;
  RETURN_IF_ERROR(ApplyUcxDefaults(options));
  ASSIGN_OR_RETURN(std::unique_ptr<Transport> transport, UcxTransport::Create(options));
  LogInfo("transport.open", {{"kind", transport->kind()}, {"lanes", transport->lanes()}});
  return transport;
}

absl::StatusOr<std::unique_ptr<Model>> LoadModel(const WorkerFlags& flags,
                                                 const ExpertSelection& experts,
                                                 bool only_experts) {
  const absl::Time begin = absl::Now();
  absl::Time last = begin;
  LoadOptions options;
  options.experts = experts;
  options.only_experts = only_experts;
  options.threads = flags.threads;
  options.packed.folder = PackedFolder(flags.packed_dir, flags.model);
  options.note = [](std::string_view line) { LogInfo("model.packing", {{"what", line}}); };
  const auto due = [&last] {
    const absl::Time now = absl::Now();
    if (now - last < absl::Seconds(1)) return false;
    last = now;
    return true;
  };
  options.progress = [&due](int64_t done, int64_t all) {
    if (!due()) return;
    LogInfo("model.loading", {{"done_mib", done >> 20},
                              {"of_mib", all >> 20},
                              {"percent", all > 0 ? 100 * done / all : 100}});
  };
  options.digest_progress = [&due](int64_t done, int64_t all) {
    if (due()) LogInfo("model.loading", {{"digest_tensors", done}, {"of_tensors", all}});
  };
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::Load(flags.model, options));
  LogInfo("model.loaded",
          {{"folder", flags.model},
           {"digest", model->digest()},
           {"weight_mib", model->weight_bytes() >> 20},
           {"packed", model->packed().path.empty() ? "in memory" : model->packed().path},
           {"refused_files", model->packed().refused},
           {"seconds", absl::ToDoubleSeconds(absl::Now() - begin)}});
  return model;
}

std::vector<std::pair<std::string, std::string>> DescribeWorker(const WorkerFlags& flags) {
  const UcxTransportOptions ucx;
  return {{"name", flags.name},
          {"model", flags.model},
          {"router", absl::StrJoin(flags.routers, ",")},
          {"listen", flags.listen},
          {"http", flags.http},
          {"transport-listen", flags.transport_listen},
          {"threads", std::to_string(flags.threads)},
          {"packed-dir", flags.packed_dir},
          {"drain-seconds", absl::StrFormat("%g", flags.drain_seconds)},
          {"transport peers", std::to_string(ucx.peers_max)},
          {"transport sends", std::to_string(ucx.sends_max)},
          {"transport payload", absl::StrFormat("%d MiB", ucx.payload_bytes_max >> 20)}};
}

}  // namespace deltamesh
