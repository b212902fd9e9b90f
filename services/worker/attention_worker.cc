#include "services/worker/attention_worker.h"

#include "CLI/CLI.hpp"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/cache/available_memory.h"
#include "runtime/prefix/prefix_hash.h"
#include "runtime/store/s3_client.h"
#include "runtime/text/text_digest.h"
#include "services/common/flag_range.h"
#include "services/common/protocol.h"
#include "services/worker/early_checks.h"
#include "services/worker/metric_list.h"
#include "services/worker/model_loading.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

void AddAttentionFlags(CLI::App* app, AttentionFlags* f) {
  AddWorkerFlags(app, &f->worker);
  // What is counted is the last word of a flag's name.
  const auto unit = [](const std::string& name) { return name.substr(name.rfind('-') + 1); };
  auto bound = [=](const char* name, int64_t* value, const char* help) {
    app->add_option(name, *value, help)
        ->check(WholeIn(1, int64_t{1} << 40, unit(name)))
        ->capture_default_str();
  };
  bound("--slabs", &f->engine.slabs, "sequences that can be resident");
  bound("--latent-blocks", &f->engine.latent_blocks, "64-token latent blocks in the pool");
  bound("--step-tokens", &f->engine.step_tokens_max, "token budget of one step");
  bound("--chunk-tokens", &f->engine.chunk_tokens_max,
        "most prompt tokens of one sequence in a step");
  bound("--running", &f->engine.running_max, "sequences in one batch");
  bound("--context-tokens", &f->engine.context_tokens_max,
        "most prompt + answer tokens of a sequence");
  app->add_option("--cache-mib", f->cache_mib,
                  "MiB (2^20 bytes) of prefix cache: snapshots and the latents they need; 0: none")
      ->check(WholeIn(0, int64_t{1} << 30, "MiB"))
      ->capture_default_str();
  app->add_option(
         "--cache-breakpoint-share", f->cache_breakpoint_share,
         "share (0 to 1) of the prefix cache's bytes that the snapshots at breakpoints of one "
         "tenant (cache salt) may have while others' have to make room")
      ->check(NumberIn(0, 1, "as a share"))
      ->capture_default_str();
  app->add_option(
      "--store-dir", f->store_dir,
      "folder, which the processes of a machine may share, for states that rest; bounded in bytes "
      "by --store-gib (default: none)");
  auto positive = [=](const char* name, double* value, const char* help) {
    const bool bytes = unit(name) == "gib";
    app->add_option(name, *value, help)
        ->check(NumberIn(1e-6, 1e9, bytes ? "GiB" : unit(name)))
        ->capture_default_str();
  };
  positive("--store-gib", &f->store_gib, "GiB (2^30 bytes) that the folder may hold");
  const auto records = [app](const char* name, int64_t* value, const char* help) {
    app->add_option(name, *value, help)
        ->check(WholeIn(1, kStoreRecordsMax, "records"))
        ->capture_default_str();
  };
  records("--store-records", &f->store_records,
          "records of suspended sessions that the folder may hold; further ones are refused");
  app->add_option(
         "--store-tenant-share", f->store_tenant_share,
         "share (0 to 1) of the records of suspended sessions, and of their bytes, that one "
         "tenant (cache salt) may have in a store")
      ->check(NumberIn(0, 1, "as a share"))
      ->capture_default_str();
  positive("--store-after-seconds", &f->store_after_seconds,
           "seconds that a state rests in memory until it is written");
  app->add_option(
      "--store-s3", f->store_s3,
      "http(s)://host:port/bucket/prefix of an S3-compatible object store for states; "
      "credentials from AWS_ACCESS_KEY_ID and so on; bounded in bytes by --store-s3-gib "
      "(default: none)");
  positive("--store-s3-gib", &f->store_s3_gib, "GiB (2^30 bytes) that the object store may hold");
  records("--store-s3-records", &f->store_s3_records,
          "records of suspended sessions that the object store may hold; further ones are refused");
  positive("--store-s3-after-seconds", &f->store_s3_after_seconds,
           "seconds that a state rests in the folder until it is sent to the object store");
  bound("--requests", &f->requests, "requests admitted at once, in any state");
  app->add_option("--expert-seconds", f->expert_seconds, "longest wait for a shard within a step")
      ->check(NumberIn(1e-3, 1e9, "seconds"))
      ->capture_default_str();
  app->add_option(
         "--transport-expect-mb", f->transport_expect_mb,
         "MB/s that a connection for hand-offs should carry; each that is opened is measured "
         "once, and transport.slow is logged for less; 0: no warning")
      ->check(WholeIn(0, 1000000000, "MB/s"))
      ->capture_default_str();
  app->add_option("--handoff-seconds", f->handoff_seconds,
                  "longest silence within a hand-off; the time a prompt computes does not count")
      ->check(NumberIn(1e-3, 1e9, "seconds"))
      ->capture_default_str();
  app->add_option("--fetches", f->fetches,
                  "states fetched from other workers at once, and sent to them at once; 0: none")
      ->check(WholeIn(0, int64_t{1} << 12, "states"))
      ->capture_default_str();
  app->add_option("--fetch-seconds", f->fetch_seconds,
                  "longest wait for a state that is fetched; then its prompt is computed")
      ->check(NumberIn(1e-3, 1e9, "seconds"))
      ->capture_default_str();
  app->add_flag("--local-experts", f->local_experts,
                "load the routed experts here instead of using expert shards");
}

absl::Status FinishEngineOptions(int64_t model_context, EngineOptions* options) {
  if (model_context > 0 && options->context_tokens_max > model_context) {
    LogWarning("worker.context_lowered",
               {{"asked", options->context_tokens_max}, {"model", model_context}});
    options->context_tokens_max = model_context;
  }
  return CheckEngineOptions(*options);
}

namespace {

// What is left of `asked` beside the pools: memory is committed when touched, so a larger cache would start
// well and be killed under load.
int64_t CacheBytes(int64_t asked, const StatePools& pools) {
  const absl::StatusOr<int64_t> available = AvailableMemory();
  if (!available.ok()) return asked;
  const int64_t taken = pools.slabs->slots() * pools.layout.slab_bytes() +
                        pools.blocks->slots() * pools.layout.block_bytes();
  const int64_t room = std::max<int64_t>(0, *available - taken);
  if (asked > room) LogWarning("worker.cache_lowered", {{"asked", asked}, {"bytes", room}});
  return std::min(asked, room);
}

int64_t BytesOfGib(double gib) { return static_cast<int64_t>(gib * (int64_t{1} << 30)); }

// Null when the flags, after CheckStores, ask for none.
absl::StatusOr<std::unique_ptr<StateTier>> MakeTier(const AttentionFlags& flags, const Model& model,
                                                    PrefixCache* cache, const Clock* clock,
                                                    std::function<void()> wake) {
  if (flags.store_dir.empty() && flags.store_s3.empty()) return nullptr;
  CHECK(cache != nullptr, "a store, and --cache-mib is 0");
  const StateIdentity identity = {.model = PrefixModel(model.digest(), kStateLayoutVersion),
                                  .layout = model.state_layout()};
  std::unique_ptr<DiskStore> disk;
  if (!flags.store_dir.empty()) {
    DiskStoreOptions options;
    options.folder = flags.store_dir;
    options.bytes_max = BytesOfGib(flags.store_gib);
    options.records_max = flags.store_records;
    options.records_bytes_max = options.bytes_max / 2;  // states need room, too
    options.record_group_share = flags.store_tenant_share;
    options.identity = identity;
    ASSIGN_OR_RETURN(disk, DiskStore::Open(options, clock));
  }
  std::unique_ptr<ObjectStates> objects;
  if (!flags.store_s3.empty()) {
    ASSIGN_OR_RETURN(const S3Options s3, ParseS3(flags.store_s3, ReadEnvironment));
    ASSIGN_OR_RETURN(std::unique_ptr<S3Client> client, S3Client::Create(s3, clock));
    ASSIGN_OR_RETURN(std::unique_ptr<S3Client> for_records, S3Client::Create(s3, clock));
    ObjectStatesOptions options;
    options.bytes_max = BytesOfGib(flags.store_s3_gib);
    options.records_max = flags.store_s3_records;
    options.record_group_share = flags.store_tenant_share;
    options.identity = identity;
    objects =
        std::make_unique<ObjectStates>(options, std::move(client), clock, std::move(for_records));
  }
  StateTierOptions options;
  options.write_after = absl::Seconds(flags.store_after_seconds);
  options.upload_after = absl::Seconds(flags.store_s3_after_seconds);
  options.object_url = flags.store_s3;
  // What waits to be written stays in memory whatever the cache drops.
  options.queue_bytes_max = std::min(options.queue_bytes_max, (flags.cache_mib << 20) / 4);
  return std::make_unique<StateTier>(options, cache, std::move(disk), std::move(objects),
                                     std::move(wake));
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionWorker>> AttentionWorker::Create(
    const AttentionFlags& flags, std::unique_ptr<Transport> transport, std::function<void()> wake) {
  std::unique_ptr<AttentionWorker> worker(new AttentionWorker());
  worker->flags_ = flags;
  ASSIGN_OR_RETURN(const ModelConfig on_disk, ModelConfig::Load(flags.worker.model));
  RETURN_IF_ERROR(FinishEngineOptions(on_disk.context_tokens, &worker->flags_.engine));
  worker->epoch_ = static_cast<uint64_t>(absl::ToUnixNanos(absl::Now()));
  ASSIGN_OR_RETURN(worker->text_digest_, TextDigest(flags.worker.model));
  worker->transport_ = std::move(transport);
  worker->transport_address_ = worker->transport_->address();
  worker->transport_kind_ = worker->transport_->kind();
  worker->pool_ =
      std::make_unique<ThreadPool>(flags.worker.threads, absl::Microseconds(flags.worker.spin_us));
  ExpertSelection selection;
  selection.kind = flags.local_experts ? ExpertSelection::Kind::kAll : ExpertSelection::Kind::kNone;
  ASSIGN_OR_RETURN(worker->model_, LoadModel(flags.worker, selection, /*only_experts=*/false));

  const ModelConfig& config = worker->model_->config();
  ExpertBackend* experts = nullptr;
  if (flags.local_experts || config.experts == 0) {
    worker->local_ =
        std::make_unique<LocalExperts>(&worker->model_->experts(), worker->pool_.get());
    experts = worker->local_.get();
  } else {
    RemoteExpertsOptions options;
    options.caller = flags.worker.name;
    options.model_digest = worker->model_->digest();
    options.experts = config.experts;
    options.width = config.expert_width();
    options.deadline = absl::Seconds(flags.expert_seconds);
    worker->remote_ = std::make_unique<RemoteExperts>(worker->transport_.get(), options);
    experts = worker->remote_.get();
  }
  ASSIGN_OR_RETURN(worker->engine_, Engine::Create(worker->model_.get(), experts,
                                                   worker->pool_.get(), worker->flags_.engine));
  if (flags.cache_mib > 0) {
    const int64_t bytes = CacheBytes(flags.cache_mib << 20, worker->engine_->pools());
    worker->flags_.cache_mib = bytes >> 20;
    ASSIGN_OR_RETURN(
        worker->cache_,
        PrefixCache::Create(
            {.bytes_max = bytes, .breakpoint_share = flags.cache_breakpoint_share, .plan = {}},
            worker->engine_->pools()));
  }
  ASSIGN_OR_RETURN(worker->tier_, MakeTier(worker->flags_, *worker->model_, worker->cache_.get(),
                                           &worker->clock_, std::move(wake)));
  return worker;
}

AttentionWorker::~AttentionWorker() { StopTransport(); }

void AttentionWorker::StopTransport() { transport_.reset(); }

HandoffIdentity AttentionWorker::identity() const {
  HandoffIdentity identity;
  identity.digest = model_->digest();
  identity.protocol = kMeshProtocol;
  return identity;
}

FetchOptions AttentionWorker::fetch_options() const {
  return {.open_max = flags_.fetches,
          .claim_max = absl::Seconds(flags_.handoff_seconds),
          .whole_max = absl::Seconds(flags_.fetch_seconds)};
}

mesh::Register AttentionWorker::MakeRegister(mesh::Role role) const {
  mesh::Register out;
  out.set_name(flags_.worker.name);
  out.set_role(role);
  out.set_epoch(epoch_);
  *out.mutable_model() = MakeModelIdentity(model_->digest(), text_digest_);
  out.mutable_capacity()->set_slabs(static_cast<uint64_t>(flags_.engine.slabs));
  out.mutable_capacity()->set_latent_blocks(static_cast<uint64_t>(flags_.engine.latent_blocks));
  out.mutable_capacity()->set_context_tokens(
      static_cast<uint64_t>(flags_.engine.context_tokens_max));
  out.mutable_capacity()->set_step_tokens(static_cast<uint64_t>(flags_.engine.step_tokens_max));
  const StateLayout& layout = model_->state_layout();
  out.mutable_capacity()->set_slab_bytes(static_cast<uint64_t>(layout.snapshot_bytes()));
  out.mutable_capacity()->set_block_bytes(static_cast<uint64_t>(layout.block_bytes()));
  out.set_transport_address(transport_address_);
  out.set_transport_kind(transport_kind_);
  out.set_session_store(tier_ != nullptr);
  out.set_needs_shards(remote_ != nullptr);
  out.set_state_fetch(cache_ != nullptr && flags_.fetches > 0);
  return out;
}

void AttentionWorker::SetView(const mesh::MeshView& view) {
  if (remote_ == nullptr) return;
  ExpertView to;
  to.epoch = view.epoch();
  for (const mesh::ExpertPeer& peer : view.experts()) {
    ExpertShardInfo shard;
    shard.name = peer.name();
    shard.epoch = peer.epoch();
    shard.address = peer.transport_address();
    shard.experts.assign(peer.placement().experts().begin(), peer.placement().experts().end());
    to.shards.push_back(std::move(shard));
  }
  LogInfo("experts.view", {{"epoch", to.epoch}, {"shards", to.shards.size()}});
  remote_->SetView(std::move(to));
}

absl::Status AttentionWorker::ExpertsReady() const {
  if (remote_ == nullptr || remote_->complete()) return absl::OkStatus();
  return Unavailable(
      "some routed experts have no live shard; start all `deltamesh expert` shards with a --router "
      "of this worker's, or this worker with --local-experts");
}

std::vector<MetricSample> AttentionWorker::Metrics() const {
  MetricList list;
  list.Gauge("model_weight_bytes", "Resident bytes of packed weights.", model_->weight_bytes());
  if (remote_ == nullptr) return list.Take();
  const RemoteExpertsStats stats = remote_->stats();
  list.Counter("expert_calls_total", "Calls sent to expert shards.", stats.calls);
  list.Counter("expert_rows_total", "Rows sent to expert shards.", stats.rows);
  const char* failures = "Expert calls that failed, by cause.";
  list.Counter("expert_call_failures_total", failures, stats.refused, {{"cause", "refused"}});
  list.Counter("expert_call_failures_total", failures, stats.corrupt, {{"cause", "corrupt"}});
  list.Counter("expert_call_failures_total", failures, stats.lost, {{"cause", "lost"}});
  list.Counter("expert_call_failures_total", failures, stats.expired, {{"cause", "expired"}});
  list.Gauge("experts_complete", "1 when every expert has a live shard.", ExpertsReady().ok());
  return list.Take();
}

std::vector<std::pair<std::string, std::string>> AttentionWorker::Describe() const {
  const EngineOptions& e = flags_.engine;
  const StateLayout& layout = model_->state_layout();
  auto mib = [](int64_t bytes) {
    return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  };
  std::vector<std::pair<std::string, std::string>> out = DescribeWorker(flags_.worker);
  const std::pair<const char*, int64_t> bounds[] = {{"slabs", e.slabs},
                                                    {"latent-blocks", e.latent_blocks},
                                                    {"step-tokens", e.step_tokens_max},
                                                    {"chunk-tokens", e.chunk_tokens_max},
                                                    {"running", e.running_max},
                                                    {"context-tokens", e.context_tokens_max},
                                                    {"cache-mib", flags_.cache_mib},
                                                    {"requests", flags_.requests}};
  for (const auto& [name, value] : bounds) out.emplace_back(name, std::to_string(value));
  out.emplace_back("cache-breakpoint-share", absl::StrFormat("%g", flags_.cache_breakpoint_share));
  const auto store = [](const std::string& where, double gib, int64_t records, double seconds) {
    return where.empty() ? std::string("none")
                         : absl::StrFormat("%s, at most %g GiB and %d records, after %g s of rest",
                                           where, gib, records, seconds);
  };
  out.emplace_back("store", store(flags_.store_dir, flags_.store_gib, flags_.store_records,
                                  flags_.store_after_seconds));
  out.emplace_back("object store", store(flags_.store_s3, flags_.store_s3_gib,
                                         flags_.store_s3_records, flags_.store_s3_after_seconds));
  out.emplace_back("store-tenant-share", absl::StrFormat("%g", flags_.store_tenant_share));
  out.emplace_back("expert-seconds", absl::StrFormat("%g", flags_.expert_seconds));
  out.emplace_back("transport-expect-mb", std::to_string(flags_.transport_expect_mb));
  out.emplace_back("handoff-seconds", absl::StrFormat("%g", flags_.handoff_seconds));
  out.emplace_back("fetches", absl::StrFormat("%d in, %d out", flags_.fetches, flags_.fetches));
  out.emplace_back("fetch-seconds", absl::StrFormat("%g", flags_.fetch_seconds));
  out.emplace_back("experts", remote_ != nullptr ? "on shards" : "in this process");
  out.emplace_back("weights resident", mib(model_->weight_bytes()));
  out.emplace_back("slab pool", mib(layout.slab_bytes() * e.slabs) + " reserved");
  out.emplace_back("latent block pool", mib(layout.block_bytes() * e.latent_blocks) + " reserved");
  return out;
}

}  // namespace deltamesh
