#include "services/simulate/simulation.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "runtime/base/status.h"
#include "services/common/quantities.h"
#include "services/plan/model_shape.h"
#include "services/simulate/agent_traffic.h"
#include "services/simulate/cache_policy.h"
#include "services/simulate/cache_run.h"
#include "services/simulate/chat_traffic.h"
#include "services/simulate/document_traffic.h"
#include "services/simulate/report.h"
#include "services/simulate/trace_traffic.h"

namespace deltamesh {
namespace {

using nlohmann::ordered_json;

constexpr double kBytesMax = 1e18;  // stands for no bound; every sum of sizes stays below 2^63

}  // namespace

absl::Status CheckSimulation(const SimulationOptions& o) {
  RETURN_IF_ERROR(CheckWhole("sessions", o.sessions, 1, kSessionsMax, "sessions"));
  RETURN_IF_ERROR(CheckWhole("chats", o.chats, 1, kSessionsMax, "chats"));
  RETURN_IF_ERROR(CheckWhole("requests", o.requests, 1, kDocumentRequestsMax, "requests"));
  RETURN_IF_ERROR(CheckWhole("sequences", o.slabs, 1, kSequencesMax, "sequences"));
  RETURN_IF_ERROR(CheckNumber(kHoursRange, o.hours));
  RETURN_IF_ERROR(CheckNumber(kPromptRateRange, o.rates.prompt_tokens_per_second));
  RETURN_IF_ERROR(CheckNumber(kStepRange, o.rates.step_seconds * 1e3));
  RETURN_IF_ERROR(CheckNumber(kTokenRange, o.rates.token_seconds * 1e3));
  RETURN_IF_ERROR(CheckNumber(kLinkRange, o.link_bytes_per_second / 1e9));
  RETURN_IF_ERROR(CheckNumber(kCacheRange, o.cache_bytes / 1e9));
  const bool each = o.prefill_workers >= 0 && o.prefill_workers <= kVirtualWorkersMax &&
                    o.decode_workers >= 0 && o.decode_workers <= kVirtualWorkersMax;
  const int64_t workers = each ? o.prefill_workers + o.decode_workers : 0;
  if (!each || workers > kVirtualWorkersMax || (workers > 0 && o.decode_workers == 0)) {
    return InvalidArgument(
        "prefill-workers %d, decode-workers %d: use at least one decode worker and at most %d in "
        "all, or none of both for one cache without a mesh",
        o.prefill_workers, o.decode_workers, kVirtualWorkersMax);
  }
  return absl::OkStatus();
}

absl::StatusOr<CacheBytes> CacheBytesOf(const SimulationOptions& o) {
  ModelShape shape;
  if (o.config.empty()) {
    shape = KimiK3Shape();
  } else {
    ASSIGN_OR_RETURN(shape, LoadModelShape(o.config));
  }
  const SequenceSizes sizes = SizesOf(shape, o.widths);
  return CacheBytes{
      .bytes_max = static_cast<int64_t>(o.cache_bytes > 0 ? o.cache_bytes : kBytesMax),
      .block = std::llround(sizes.per_block),
      .snapshot = std::llround(sizes.snapshot())};
}

MeshRunOptions MeshOf(const SimulationOptions& o, const CachePolicy& policy,
                      const CacheBytes& bytes) {
  MeshRunOptions mesh;
  mesh.prefill_workers = o.prefill_workers;
  mesh.decode_workers = o.decode_workers;
  mesh.policy = policy;
  mesh.cache = bytes;
  mesh.rates = o.rates;
  mesh.slabs = o.slabs;
  mesh.decode_scheduler.running_max = o.slabs;
  mesh.link_bytes_per_second = o.link_bytes_per_second;
  return mesh;
}

absl::StatusOr<std::unique_ptr<Traffic>> MakeTraffic(const SimulationOptions& o) {
  if (o.traffic == "agents") {
    return std::make_unique<AgentTraffic>(
        AgentTrafficOptions{.seed = o.seed, .sessions = o.sessions, .day_seconds = o.hours * 3600});
  }
  if (o.traffic == "documents" || o.traffic == "unique") {
    return std::make_unique<DocumentTraffic>(DocumentTrafficOptions{
        .seed = o.seed,
        .requests = o.requests,
        .requests_per_second = static_cast<double>(o.requests) / (o.hours * 3600),
        .unique = o.traffic == "unique"});
  }
  if (o.traffic == "chats") {
    return std::make_unique<ChatTraffic>(
        ChatTrafficOptions{.seed = o.seed, .chats = o.chats, .seconds = o.hours * 3600});
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Traffic> trace, TraceTraffic::Open(o.traffic));
  return trace;
}

absl::StatusOr<ordered_json> Simulate(const SimulationOptions& o,
                                      const SimulationProgress& progress) {
  RETURN_IF_ERROR(CheckSimulation(o));
  ASSIGN_OR_RETURN(const CacheBytes bytes, CacheBytesOf(o));
  std::vector<CachePolicy> policies;
  for (const std::string& name : o.policies.empty() ? DefaultPolicies() : o.policies) {
    ASSIGN_OR_RETURN(CachePolicy policy, PolicyNamed(name));
    policies.push_back(std::move(policy));
  }
  std::vector<Disaggregation> ways;
  for (const std::string& name : o.disaggregation) {
    const auto way = DisaggregationNamed(name);
    if (!way) {
      return InvalidArgument("disaggregate: \"%s\" is not known; use planned, always or never",
                             name);
    }
    ways.push_back(*way);
  }
  ordered_json document = {{"model", o.config.empty() ? "Kimi K3" : o.config},
                           {"snapshot_bytes", bytes.snapshot},
                           {"block_bytes", bytes.block},
                           {"traffic", o.traffic},
                           {"seed", o.seed},
                           {"cache_bytes", o.cache_bytes},
                           {"prefill_workers", o.prefill_workers},
                           {"decode_workers", o.decode_workers}};
  const bool mesh = o.prefill_workers + o.decode_workers > 0;
  if (mesh) {
    document["assumed"] = {{"prompt_tokens_per_second", o.rates.prompt_tokens_per_second},
                           {"step_seconds", o.rates.step_seconds},
                           {"token_seconds", o.rates.token_seconds},
                           {"link_bytes_per_second", o.link_bytes_per_second},
                           {"sequences_per_worker", o.slabs}};
  }
  ordered_json cache_rows = ordered_json::array(), mesh_rows = ordered_json::array();
  std::optional<CacheRunResult> bound;
  for (const CachePolicy& policy : policies) {
    if (mesh && !policy.free_state) {
      for (const Disaggregation way : ways) {
        ASSIGN_OR_RETURN(const std::unique_ptr<Traffic> traffic, MakeTraffic(o));
        MeshRunOptions options = MeshOf(o, policy, bytes);
        options.disaggregation = way;
        ASSIGN_OR_RETURN(const MeshRunResult result, RunMesh(*traffic, options));
        mesh_rows.push_back(MeshRow(policy.name, DisaggregationName(way), result,
                                    bound ? std::optional(bound->hit_rate()) : std::nullopt));
        if (progress) progress(policy.name, result.requests);
      }
      continue;
    }
    CacheBytes all = bytes;  // one cache as large as all workers' together
    if (mesh && o.cache_bytes > 0) {
      const double workers = static_cast<double>(o.prefill_workers + o.decode_workers);
      all.bytes_max = static_cast<int64_t>(std::min(kBytesMax, o.cache_bytes * workers));
    }
    ASSIGN_OR_RETURN(const std::unique_ptr<Traffic> traffic, MakeTraffic(o));
    ASSIGN_OR_RETURN(const CacheRunResult result, RunCache(*traffic, policy, all));
    if (policy.free_state) bound = result;
    cache_rows.push_back(CacheRow(policy.name, result, bound));
    if (progress) progress(policy.name, result.requests);
  }
  if (!cache_rows.empty()) document["one_cache"] = std::move(cache_rows);
  if (!mesh_rows.empty()) document["mesh"] = std::move(mesh_rows);
  return document;
}

void PrintSimulation(const ordered_json& document, std::ostream& out) {
  out << absl::StrFormat("%s: a snapshot is %s, a block of latents %s; traffic %s, seed %d\n",
                         document["model"].get<std::string>(),
                         DecimalBytes(document["snapshot_bytes"].get<double>()),
                         DecimalBytes(document["block_bytes"].get<double>()),
                         document["traffic"].get<std::string>(), document["seed"].get<uint64_t>());
  const double cache = document["cache_bytes"].get<double>();
  const std::string size = cache > 0 ? "of " + DecimalBytes(cache) : "without bound";
  if (document.contains("one_cache")) {
    const bool mesh = document["decode_workers"].get<int64_t>() > 0;
    out << absl::StrFormat("\none cache %s%s, always there, no queue\n", size,
                           mesh ? " for each worker, all in one" : "");
    PrintCacheRows(document["one_cache"], out);
  }
  if (document.contains("mesh")) {
    out << absl::StrFormat("\n%s prefill and %s decode workers, a cache %s each\n",
                           Grouped(document["prefill_workers"].get<int64_t>()),
                           Grouped(document["decode_workers"].get<int64_t>()), size);
    PrintMeshRows(document["mesh"], out);
  }
}

}  // namespace deltamesh
