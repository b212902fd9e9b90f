// What prefill and decode workers own alike: the model without its routed experts, the transport, the
// client of the expert shards, the engine with its pools.
//
// The transport calls into its handlers, so it is destroyed first: StopTransport.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/base/clock.h"
#include "runtime/base/thread_pool.h"
#include "runtime/cache/prefix_cache.h"
#include "runtime/engine/engine.h"
#include "runtime/expert/local_experts.h"
#include "runtime/expert/remote_experts.h"
#include "runtime/model/model.h"
#include "runtime/transfer/handoff_types.h"
#include "runtime/transfer/transport.h"
#include "services/common/flags.h"
#include "services/worker/fetch_client.h"
#include "services/worker/state_tier.h"
#include "services/worker/worker_core.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct AttentionFlags {
  WorkerFlags worker;
  EngineOptions engine;
  int64_t cache_mib = 1024;  // prefix cache: snapshots and the latents they need; 0: none
  double cache_breakpoint_share = 0.5;  // of it, for the breakpoints of one tenant
  // Tiers below the cache (state_tier.h); empty: none.
  std::string store_dir;
  double store_gib = 64;  // of the folder, all processes that share it together
  int64_t store_records = kStoreRecordsDefault;  // suspended sessions in it
  double store_tenant_share = 0.5;  // of them and their bytes, in either store, for one tenant
  double store_after_seconds = 30;  // at rest, until written
  std::string store_s3;
  double store_s3_gib = 1024;
  int64_t store_s3_records = kStoreRecordsDefault;
  double store_s3_after_seconds = 600;  // at rest on disk, until sent
  int64_t requests = 256;               // admitted at once, in any state
  bool local_experts = false;           // load the routed experts instead of using shards
  double expert_seconds = 5;            // longest wait for a shard's answer within a step
  double handoff_seconds = 10;          // longest silence within a hand-off
  int64_t transport_expect_mb = 100;    // MB/s of a hand-off's connection, or a warning; 0: none
  // States that are fetched from other workers at once, and sent to them at once; 0: none.
  int64_t fetches = FetchOptions().open_max;
  double fetch_seconds = 30;  // longest wait for one
};
void AddAttentionFlags(CLI::App* app, AttentionFlags* flags);

// Checks the engine's bounds before anything is loaded, and lowers --context-tokens to what a model with
// `model_context` positions can hold (0: it does not say).
absl::Status FinishEngineOptions(int64_t model_context, EngineOptions* options);

// Not thread-safe.
class AttentionWorker {
 public:
  // Loads the model with visible progress. `transport` is taken over. `wake` has the core's thread look
  // around soon; it is called on other threads and may be null.
  static absl::StatusOr<std::unique_ptr<AttentionWorker>> Create(
      const AttentionFlags& flags, std::unique_ptr<Transport> transport,
      std::function<void()> wake = nullptr);
  ~AttentionWorker();

  Model& model() { return *model_; }
  Engine& engine() { return *engine_; }
  PrefixCache* cache() { return cache_.get(); }  // null: none
  StateTier* tier() { return tier_.get(); }      // null: none
  Transport& transport() { return *transport_; }
  HandoffIdentity identity() const;
  FetchOptions fetch_options() const;
  uint64_t epoch() const { return epoch_; }

  mesh::Register MakeRegister(mesh::Role role) const;
  // Thread-safe.
  void SetView(const mesh::MeshView& view);
  absl::Status ExpertsReady() const;
  std::vector<MetricSample> Metrics() const;

  // Ends all transfers; what their handlers point to may be destroyed afterwards.
  void StopTransport();

  // Printed at start.
  std::vector<std::pair<std::string, std::string>> Describe() const;

 private:
  AttentionWorker() = default;
  AttentionFlags flags_;
  uint64_t epoch_ = 0;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Transport> transport_;
  std::string transport_address_, transport_kind_;
  std::string text_digest_;
  std::unique_ptr<LocalExperts> local_;
  std::unique_ptr<RemoteExperts> remote_;
  std::unique_ptr<Engine> engine_;
  SystemClock clock_;
  std::unique_ptr<PrefixCache> cache_;
  std::unique_ptr<StateTier> tier_;
};

}  // namespace deltamesh
