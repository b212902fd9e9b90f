#include "services/worker/model_loading.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/transfer/ucx_transport.h"
#include "services/common/address.h"
#include "services/common/process.h"

namespace deltamesh {

namespace {

// HOST[:PORT[-LAST]], IPv6 in brackets. UCX takes numeric addresses only.
absl::Status ParseTransportListen(std::string_view text, UcxTransportOptions* options) {
  const bool bracket = text.starts_with('[') && text.find(']') != std::string_view::npos;
  const size_t host_end = bracket ? text.find(']') + 1 : std::min(text.find(':'), text.size());
  const std::string host(bracket ? text.substr(1, host_end - 2) : text.substr(0, host_end));
  std::string ports(text.substr(host_end));
  if (ports.empty()) ports = ":0";
  const size_t dash = std::min(ports.find('-'), ports.size());
  const std::string flag = "--transport-listen";
  ASSIGN_OR_RETURN(auto first, ParseHostPort(flag, "x" + ports.substr(0, dash)));
  ASSIGN_OR_RETURN(options->host, NumericHost(flag, host));
  options->port = options->port_last = first.second;
  if (dash < ports.size()) {
    ASSIGN_OR_RETURN(auto last, ParseHostPort(flag, "x:" + ports.substr(dash + 1)));
    options->port_last = last.second;
    if (options->port == 0 || options->port_last < options->port)
      return InvalidArgument("%s: %s is no range of ports; write HOST:9000-9031", flag, text);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> OpenUcx(const WorkerFlags& flags) {
  RestoreCrashSignals();
  UcxTransportOptions options;
  RETURN_IF_ERROR(ParseTransportListen(flags.transport_listen, &options));
  if (!flags.transport_advertise.empty()) {
    ASSIGN_OR_RETURN(options.advertise_host,
                     NumericHost("--transport-advertise", flags.transport_advertise));
  }
  options.peers_max = flags.transport_peers;
  options.spin = absl::Microseconds(flags.spin_us);
  RETURN_IF_ERROR(ApplyUcxDefaults(options));
  ASSIGN_OR_RETURN(std::unique_ptr<UcxTransport> transport, UcxTransport::Create(options));
  LogInfo("transport.open", {{"kind", transport->kind()},
                             {"lanes", transport->lanes()},
                             {"host", options.host},
                             {"port", transport->port()}});
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
  CHECK(ParseWeightWidth(flags.weights, &options.weights), "weights %s", flags.weights);
  CHECK(ParseActivations(flags.activations, &options.activations), "activations %s",
        flags.activations);
  options.packed.folder = PackedFolder(flags.packed_dir, flags.model);
  options.packed.bytes_max = static_cast<int64_t>(flags.packed_max_gib * (int64_t{1} << 30));
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
    if (due()) LogInfo("model.loading", {{"checksum_mib", done >> 20}, {"of_mib", all >> 20}});
  };
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::Load(flags.model, options));
  LogInfo("model.loaded",
          {{"folder", flags.model},
           {"digest", model->digest()},
           {"activations", flags.activations},
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
          {"cpus", flags.cpus.empty() ? "any" : flags.cpus},
          {"spin-us", std::to_string(flags.spin_us)},
          {"weights", flags.weights},
          {"activations", flags.activations},
          {"packed-dir", flags.packed_dir},
          {"packed-max-gib", absl::StrFormat("%g", flags.packed_max_gib)},
          {"drain-seconds", absl::StrFormat("%g", flags.drain_seconds)},
          {"transport-peers", std::to_string(flags.transport_peers)},
          {"transport strangers", absl::StrFormat("%d silent, cut after %s", ucx.strangers_max,
                                                  absl::FormatDuration(ucx.stranger_silence))},
          {"transport greeting", absl::FormatDuration(ucx.greeting_max)},
          {"transport sends", std::to_string(ucx.sends_max)},
          {"transport payload", absl::StrFormat("%d MiB", ucx.payload_bytes_max >> 20)}};
}

}  // namespace deltamesh
