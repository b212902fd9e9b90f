// The logic of a decode worker: admits sequences, waits for their state, steps the engine, streams tokens.
//
// A request is in one of four states: loading (its state is read from the store; nothing is reserved),
// fetching (slab and blocks reserved, its state is asked for from another worker), landing (reserved, a
// transfer granted) or running (in the engine).
//
// See worker_core.h for the rules of a core.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
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

struct DecodeOptions {
  int64_t requests_max = 256;    // landing and running together
  int64_t handoffs_max = 16;     // hand-offs refused for one request
  PrefixCache* cache = nullptr;  // not owned; null: nothing is found or kept
  StateTier* tier = nullptr;     // below the cache; not owned, may be null
  FetchOptions fetch;
};

class DecodeCore final : public StateWorkerCore {
 public:
  // Pointers are not owned and must outlive the core. `on_view` gets the expert shards on each change.
  DecodeCore(const DecodeOptions& options, mesh::Register registration, Engine* engine,
             const TransferEnds& ends, std::function<void(const mesh::MeshView&)> on_view);
  ~DecodeCore() override;

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
  int64_t landing() const;
  int64_t loading() const;

 private:
  struct Request;

  void OnCancel(LinkId link, const RequestId& id, absl::Time now);
  void OnStartDecode(LinkId link, const mesh::StartDecode& message, absl::Time now);
  absl::Status CheckStart(const mesh::StartDecode& message) const;
  absl::Status Admit(Request& request, absl::Time now);
  absl::Status GrantLanding(Request& request, HandoffBuffers buffers);
  // Null: from what the cache has.
  absl::Status Run(Request& request, std::unique_ptr<SequenceState> state, absl::Time now);
  // Has a state read from the store, or else runs from what is here.
  absl::Status LoadOrRun(Request& request, absl::Time now);
  // Runs those whose state has been read or fetched, or who should not wait for it any more.
  void RunArrived(absl::Time now);
  void OnCompleted(HandoffCompleted event, absl::Time now);
  void OnRefused(HandoffRefused event);
  void SendHandoffResult(const Request& request, const absl::Status& status,
                         const std::string& reason, uint64_t bytes, double seconds);
  // `now` is when the step began.
  void Relay(const StepReport& report, absl::Time now);

  const DecodeOptions options_;
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
  uint64_t generated_tokens_ = 0;
  RequestTable<Request> requests_;
};

}  // namespace deltamesh
