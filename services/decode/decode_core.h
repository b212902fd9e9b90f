// The logic of a decode worker: admits sequences, waits for their state, steps the engine, streams tokens.
//
// A request is in one of two states: landing (slab and blocks reserved, a transfer granted) or running (in
// the engine). Whatever ends it - the answer, a failure, a cancel, a deadline, a lost router - frees
// everything of it in the same call.
//
// See worker_core.h for the rules of a core.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "runtime/engine/engine.h"
#include "runtime/transfer/handoff_receiver.h"
#include "services/worker/rate.h"
#include "services/worker/worker_links.h"

namespace deltamesh {

struct DecodeOptions {
  int64_t requests_max = 256;  // landing and running together
  int64_t handoffs_max = 16;   // hand-offs refused for one request
};

class DecodeCore final : public WorkerCore {
 public:
  // Pointers are not owned and must outlive the core. `on_view` gets the expert shards on each change.
  DecodeCore(const DecodeOptions& options, mesh::Register registration, Engine* engine,
             HandoffReceiver* receiver, std::function<void(const mesh::MeshView&)> on_view);
  ~DecodeCore() override;

  void OnLinkOpened(LinkId link, absl::Time now) override;
  void OnLinkClosed(LinkId link, absl::Time now) override;
  void OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) override;
  // How a transfer ended, as the receiver tells it.
  void OnHandoffEvent(HandoffEvent event, absl::Time now);

  bool Step(absl::Time now) override;
  void Tick(absl::Time now) override;
  std::vector<SendToRouter> TakeActions() override { return links_.Take(); }

  void Drain(absl::Time now) override;
  bool Idle() const override { return requests_.empty(); }
  bool Registered() const override { return links_.registered(); }
  std::vector<MetricSample> Metrics() const override;

  mesh::Heartbeat load() const;
  int64_t landing() const;

 private:
  struct Request;
  using RequestMap = std::map<RequestId, std::unique_ptr<Request>>;

  void OnStartDecode(LinkId link, const mesh::StartDecode& message, absl::Time now);
  absl::Status CheckStart(LinkId link, const mesh::StartDecode& message) const;
  absl::Status Admit(Request& request);
  absl::Status GrantLanding(Request& request, HandoffBuffers buffers);
  absl::Status Run(Request& request, std::unique_ptr<SequenceState> state);
  void OnCompleted(HandoffCompleted event);
  void OnRefused(HandoffRefused event);
  // The landing request an event is about; null when it is of an ended or older hand-off.
  Request* FindLanding(const RequestId& id, uint32_t serial);

  // Frees everything of the request.
  void Free(RequestMap::iterator it);
  void Fail(const RequestId& id, const absl::Status& status);
  void SendFailed(LinkId link, const RequestId& id, uint32_t attempt, const absl::Status& status);
  void SendHandoffResult(const Request& request, const absl::Status& status,
                         const std::string& reason, uint64_t bytes, double seconds);
  // `now` is when the step began.
  void Relay(const StepReport& report, absl::Time now);

  const DecodeOptions options_;
  Engine* const engine_;
  HandoffReceiver* const receiver_;
  const std::function<void(const mesh::MeshView&)> on_view_;
  WorkerLinks links_;
  RequestMap requests_;
  absl::flat_hash_map<SequenceId, RequestId> by_sequence_;
  uint32_t next_serial_ = 1;  // of grants; tells events of an older grant apart
  bool draining_ = false;
  TokenRate rate_;

  struct Counters {
    uint64_t started = 0, refused = 0, finished = 0, failed = 0, cancelled = 0, expired = 0;
    uint64_t prompt_tokens = 0, generated_tokens = 0, steps = 0;
    uint64_t handoffs_ok = 0, handoff_bytes = 0, stale_events = 0;
    double handoff_seconds = 0;
    std::map<std::string, uint64_t> handoffs_refused;  // by reason name
  } counters_;
};

}  // namespace deltamesh
