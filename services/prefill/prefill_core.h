// The logic of a prefill worker: computes prompts up to a block boundary and sends the state, layer by
// layer while the last chunk computes, latent blocks as they fill.
//
// A prompt whose beginning another worker holds may be fetched from there, or read from the store, first.
//
// What is being sent is pinned by the sender; the sequence itself leaves the engine as soon as it is
// computed, so that the next prompt can begin.
//
// See worker_core.h for the rules of a core.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "runtime/base/clock.h"
#include "runtime/engine/engine.h"
#include "services/worker/engine_steps.h"
#include "services/worker/fetch_client.h"
#include "services/worker/fetch_server.h"
#include "services/worker/handoff_counts.h"
#include "services/worker/prefix_keeper.h"
#include "services/worker/prefix_teller.h"
#include "services/worker/request_table.h"
#include "services/worker/session_desk.h"
#include "services/worker/transfer_ends.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

struct PrefillOptions {
  int64_t requests_max = 256;  // computing and sending together
  // Tells how long a step took; not owned. Null: a step's end is taken for its beginning.
  const Clock* clock = nullptr;
  // Index among the KDA layers by layer of the model; -1 for other layers.
  std::vector<int64_t> kda_index;
  PrefixCache* cache = nullptr;  // not owned; null: every prompt is computed
  StateTier* tier = nullptr;     // below the cache; not owned, may be null
  FetchOptions fetch;
};

// PrefillOptions::kda_index of a model.
std::vector<int64_t> KdaIndexOfLayers(const ModelConfig& config);

class PrefillCore final : public StateWorkerCore {
 public:
  // Pointers are not owned and must outlive the core. `on_view` gets the expert shards on each change.
  PrefillCore(PrefillOptions options, mesh::Register registration, Engine* engine,
              const TransferEnds& ends, std::function<void(const mesh::MeshView&)> on_view);
  ~PrefillCore() override;

  void OnLinkOpened(LinkId link, absl::Time now) override;
  void OnLinkClosed(LinkId link, absl::Time now) override;
  void OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) override;
  void OnHandoffSent(const HandoffSent& result, absl::Time now) override;
  void OnHandoffEvent(HandoffEvent event, absl::Time now) override;
  void OnFetchEvent(const FetchEvent& event, absl::Time now) override;
  void OnConnectionMeasured(const std::string& to, uint64_t epoch,
                            double bytes_per_second) override {
    links_.TellConnection(to, epoch, bytes_per_second);
  }

  bool Step(absl::Time now) override;
  std::optional<absl::Duration> StepTime() const override { return steps_.step_time(); }
  void Tick(absl::Time now) override;
  std::vector<SendToRouter> TakeActions() override { return links_.Take(); }

  void Drain(absl::Time now) override;
  bool Idle() const override;
  bool Registered() const override { return links_.registered(); }
  std::vector<MetricSample> Metrics() const override;

  mesh::Heartbeat load();
  int64_t sending() const;
  int64_t loading() const;

 private:
  struct Request;

  void OnStartPrefill(LinkId link, const mesh::StartPrefill& message, absl::Time now);
  absl::Status Admit(Request& request, const mesh::StartPrefill& message, absl::Time now);
  // Has a state read from the store, or else computes what the cache does not have.
  absl::Status LoadOrCompute(Request& request, absl::Time now);
  // Computes what the cache, or with a state that state, does not have.
  absl::Status Compute(Request& request, std::unique_ptr<SequenceState> state, absl::Time now);
  // Computes for those whose state has been read or fetched, or who should not wait for it any more.
  void ComputeArrived(absl::Time now);
  // What became of a request that was to be computed. Its transfer is open, and nothing of it was sent.
  void Computes(Request& request, const absl::Status& status, absl::Time now);
  void SendFullBlocks(Request& request, const SequenceState& state);
  // The whole state was restored: there is nothing to compute.
  void SendRestored(Request& request, absl::Time now);
  void OnComputed(Request& request, absl::Time now);

  const PrefillOptions options_;
  Engine* const engine_;
  const TransferEnds ends_;
  const std::function<void(const mesh::MeshView&)> on_view_;
  WorkerLinks links_;
  EngineSteps steps_;
  HandoffCounts handoffs_;
  PrefixKeeper prefixes_;
  FetchClient fetches_;
  FetchServer served_;
  PrefixTeller teller_;
  SessionDesk sessions_;
  RequestTable<Request> requests_;
};

}  // namespace deltamesh
