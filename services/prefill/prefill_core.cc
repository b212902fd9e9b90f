#include "services/prefill/prefill_core.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_types.h"
#include "services/worker/metric_list.h"

namespace deltamesh {

std::vector<int64_t> KdaIndexOfLayers(const ModelConfig& config) {
  std::vector<int64_t> out;
  for (const LayerKind& layer : config.layers) {
    out.push_back(layer.mixer == MixerKind::kKda ? layer.mixer_index : -1);
  }
  return out;
}

struct PrefillCore::Request {
  LinkId link = 0;
  RequestId id;
  uint32_t attempt = 0;
  uint32_t serial = 0;  // of its transfer
  int64_t position = 0;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time started;
  double compute_seconds = 0;  // admission to the last step's end
  SequenceId sequence;         // 0 once computed
  int64_t blocks_sent = 0;     // leading blocks given to the sender

  bool computed() const { return sequence.value == 0; }
};

PrefillCore::PrefillCore(PrefillOptions options, mesh::Register registration, Engine* engine,
                         HandoffSender* sender, std::function<void(const mesh::MeshView&)> on_view)
    : options_(std::move(options)),
      engine_(engine),
      sender_(sender),
      on_view_(std::move(on_view)),
      links_(std::move(registration)) {}

PrefillCore::~PrefillCore() {
  while (!requests_.empty()) Free(requests_.begin());
}

// ---- links ---------------------------------------------------------------------------------------

void PrefillCore::OnLinkOpened(LinkId link, absl::Time) { links_.Open(link); }

void PrefillCore::OnLinkClosed(LinkId link, absl::Time) {
  for (auto it = requests_.begin(); it != requests_.end();) {
    auto next = std::next(it);
    if (it->second->link == link) {
      ++counters_.cancelled;
      Free(it);
    }
    it = next;
  }
  links_.Close(link);
}

void PrefillCore::OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) {
  switch (message.body_case()) {
    case mesh::RouterMessage::kRegistered:
      links_.OnRegistered(link, message.registered(), now);
      break;
    case mesh::RouterMessage::kView:
      if (auto view = links_.OnView(link, message.view()); view && on_view_) on_view_(*view);
      break;
    case mesh::RouterMessage::kStartPrefill:
      OnStartPrefill(link, message.start_prefill(), now);
      break;
    case mesh::RouterMessage::kCancel: {
      auto it = requests_.find(message.cancel().request_id());
      if (it == requests_.end() || it->second->link != link) break;
      ++counters_.cancelled;
      LogInfo("prefill.cancelled", {{"request", it->first}});
      Free(it);
      break;
    }
    case mesh::RouterMessage::kStartDecode:
      SendFailed(link, message.start_decode().request_id(), message.start_decode().attempt(),
                 FailedPrecondition("%s is a prefill worker; it generates nothing",
                                    links_.registration().name()));
      break;
    case mesh::RouterMessage::BODY_NOT_SET:
      break;
  }
}

// ---- admission -----------------------------------------------------------------------------------

void PrefillCore::OnStartPrefill(LinkId link, const mesh::StartPrefill& message, absl::Time now) {
  if (auto it = requests_.find(message.request_id());
      it != requests_.end() && it->second->link == link) {
    Free(it);  // the router starts it anew
  }
  absl::Status status = CheckStart(link, message);
  if (status.ok()) {
    auto placed = requests_.emplace(message.request_id(), std::make_unique<Request>()).first;
    placed->second->link = link;
    status = Admit(*placed->second, message, now);
    if (!status.ok()) Free(placed);
  }
  if (status.ok()) {
    ++counters_.started;
    return;
  }
  ++counters_.refused;
  SendFailed(link, message.request_id(), message.attempt(), status);
}

absl::Status PrefillCore::CheckStart(LinkId link, const mesh::StartPrefill& message) const {
  if (!links_.open(link)) return Unavailable("the link is gone");
  if (draining_) return Unavailable("%s is draining", links_.registration().name());
  if (requests_.contains(message.request_id())) {
    return absl::AlreadyExistsError(
        absl::StrFormat("request_id: \"%s\" runs here for another router", message.request_id()));
  }
  if (static_cast<int64_t>(requests_.size()) >= options_.requests_max) {
    return ResourceExhausted("%d requests are admitted already; raise --requests",
                             options_.requests_max);
  }
  const auto position = static_cast<int64_t>(message.landing().position());
  if (position <= 0 || position % kBlockTokens != 0 || position != message.tokens_size()) {
    return InvalidArgument(
        "landing.position: %d with %d tokens; it must be their number and a "
        "multiple of %d",
        position, message.tokens_size(), kBlockTokens);
  }
  return absl::OkStatus();
}

absl::Status PrefillCore::Admit(Request& request, const mesh::StartPrefill& message,
                                absl::Time now) {
  request.id = message.request_id();
  request.attempt = message.attempt();
  request.serial = next_serial_++;
  request.position = message.tokens_size();
  request.started = now;
  if (message.deadline_unix_ns() != 0) {
    request.deadline = absl::FromUnixNanos(static_cast<int64_t>(message.deadline_unix_ns()));
  }

  SequenceSpec spec;
  spec.request = request.id;
  spec.prompt.assign(message.tokens().begin(), message.tokens().end());
  spec.stop_at = request.position;
  spec.layer_final = [this, id = request.id](int64_t layer, const SequenceState& state) {
    const int64_t kda = options_.kda_index[static_cast<size_t>(layer)];
    if (kda >= 0) sender_->SendLayer(id, kda, state.slab());
  };
  ASSIGN_OR_RETURN(request.sequence, engine_->Add(std::move(spec)));
  by_sequence_[request.sequence] = request.id;

  HandoffStart start;
  start.request_id = request.id;
  start.serial = request.serial;
  start.landing = message.landing();
  start.deadline = request.deadline;
  return sender_->Begin(std::move(start));
}

// ---- time ----------------------------------------------------------------------------------------

bool PrefillCore::Step(absl::Time now) {
  if (!engine_->HasWork()) {
    rate_.Idle();
    return false;
  }
  rate_.StepBegins(now);
  const StepReport report = engine_->Step();
  const absl::Time ended = options_.clock != nullptr ? options_.clock->Now() : now;
  rate_.StepEnded(report.tokens);
  ++counters_.steps;
  counters_.prompt_tokens += static_cast<uint64_t>(report.prompt_tokens);
  for (const SequenceOutput& output : report.outputs) {
    auto found = by_sequence_.find(output.id);
    if (found == by_sequence_.end()) continue;
    const RequestId id = found->second;
    if (!output.error.ok()) {
      Fail(id, output.error);
    } else if (output.finish == FinishKind::kPrefilled) {
      OnComputed(*requests_.at(id), ended);
    }
  }
  for (auto& [id, request] : requests_) {
    if (!request->computed()) SendFullBlocks(*request);
  }
  return true;
}

void PrefillCore::SendFullBlocks(Request& request) {
  const SequenceState* state = engine_->state(request.sequence);
  if (state == nullptr) return;
  for (; (request.blocks_sent + 1) * kBlockTokens <= state->position(); ++request.blocks_sent) {
    sender_->SendBlock(request.id, request.blocks_sent,
                       state->blocks()[static_cast<size_t>(request.blocks_sent)]);
  }
}

void PrefillCore::OnComputed(Request& request, absl::Time now) {
  SendFullBlocks(request);
  by_sequence_.erase(request.sequence);
  engine_->Remove(request.sequence);
  request.sequence = {};

  mesh::WorkerMessage message;
  mesh::PrefillFinished* finished = message.mutable_prefill_finished();
  finished->set_request_id(request.id);
  finished->set_attempt(request.attempt);
  finished->set_computed_tokens(static_cast<uint64_t>(request.position));
  request.compute_seconds = absl::ToDoubleSeconds(now - request.started);
  finished->set_seconds(request.compute_seconds);
  links_.Send(request.link, std::move(message));
}

void PrefillCore::Tick(absl::Time now) {
  sender_->Tick(now);
  std::vector<RequestId> expired;
  for (const auto& [id, request] : requests_) {
    if (request->deadline <= now) expired.push_back(id);
  }
  for (const RequestId& id : expired) {
    ++counters_.expired;
    Fail(id, DeadlineExceeded("the request's deadline passed while its prompt was %s",
                              requests_.at(id)->computed() ? "being sent" : "computed"));
  }
  links_.Tick(load(), now);
}

void PrefillCore::Drain(absl::Time) {
  draining_ = true;
  links_.HeartbeatSoon();
}

// ---- the end of a request ------------------------------------------------------------------------

void PrefillCore::OnHandoffSent(const HandoffSent& result, absl::Time) {
  auto it = requests_.find(result.request_id);
  if (it == requests_.end() || it->second->serial != result.serial) {
    ++counters_.stale_events;
    return;
  }
  if (result.status.ok()) {
    ++counters_.finished;
    ++counters_.handoffs_ok;
    counters_.handoff_bytes += result.bytes;
    counters_.handoff_seconds += result.seconds;
    LogInfo("prefill.finished", {{"request", result.request_id},
                                 {"attempt", it->second->attempt},
                                 {"tokens", it->second->position},
                                 {"compute_seconds", it->second->compute_seconds},
                                 {"handoff_seconds", result.seconds},
                                 {"bytes", result.bytes}});
    Free(it);
    return;
  }
  const std::string name(ReasonName(result.reason));
  ++counters_.handoffs_failed[name];
  LogWarning("handoff.failed", {{"request", result.request_id},
                                {"attempt", it->second->attempt},
                                {"reason", name},
                                {"error", result.status.ToString()}});
  // A refusal of a transfer that the receiver has open reaches the router from there, with a new landing.
  // Only what the receiver cannot lay at a request's door is ours to report.
  const bool receiver_reports = result.reason != mesh::NONE && result.reason != mesh::PEER_LOST &&
                                result.reason != mesh::TIMEOUT &&
                                result.reason != mesh::UNKNOWN_TRANSFER &&
                                result.reason != mesh::STALE_EPOCH;
  if (!receiver_reports) {
    Fail(RequestId(result.request_id), result.status);
  } else {
    ++counters_.failed;
    Free(it);
  }
}

void PrefillCore::Free(RequestMap::iterator it) {
  Request& request = *it->second;
  sender_->Cancel(it->first);
  if (!request.computed()) {
    by_sequence_.erase(request.sequence);
    engine_->Remove(request.sequence);
  }
  requests_.erase(it);
}

void PrefillCore::Fail(const RequestId& id, const absl::Status& status) {
  auto it = requests_.find(id);
  if (it == requests_.end()) return;
  ++counters_.failed;
  const LinkId link = it->second->link;
  const uint32_t attempt = it->second->attempt;
  Free(it);
  SendFailed(link, id, attempt, status);
}

void PrefillCore::SendFailed(LinkId link, const RequestId& id, uint32_t attempt,
                             const absl::Status& status) {
  LogWarning("prefill.failed",
             {{"request", id}, {"attempt", attempt}, {"error", status.ToString()}});
  mesh::WorkerMessage message;
  mesh::RequestFailed* failed = message.mutable_failed();
  failed->set_request_id(id);
  failed->set_attempt(attempt);
  failed->set_code(static_cast<int>(status.code()));
  failed->set_message(SafeMessage(status));
  links_.Send(link, std::move(message));
}

// ---- what others see -----------------------------------------------------------------------------

int64_t PrefillCore::sending() const {
  return std::count_if(requests_.begin(), requests_.end(),
                       [](const auto& entry) { return entry.second->computed(); });
}

mesh::Heartbeat PrefillCore::load() const {
  mesh::Heartbeat load;
  load.set_slabs_free(static_cast<uint64_t>(engine_->pools().slabs->free_slots()));
  load.set_latent_blocks_free(static_cast<uint64_t>(engine_->pools().blocks->free_slots()));
  load.set_running(static_cast<uint64_t>(engine_->running()));
  load.set_waiting(static_cast<uint64_t>(engine_->waiting()));
  load.set_waiting_tokens(static_cast<uint64_t>(engine_->waiting_tokens()));
  load.set_tokens_per_second(rate_.value());
  load.set_draining(draining_);
  return load;
}

std::vector<MetricSample> PrefillCore::Metrics() const {
  const Counters& c = counters_;
  MetricList list;
  const char* requests = "Requests by what happened to them here; refused ones were never started.";
  list.Counter("requests_total", requests, c.started, {{"event", "started"}});
  list.Counter("requests_total", requests, c.refused, {{"event", "refused"}});
  list.Counter("requests_total", requests, c.finished, {{"event", "finished"}});
  list.Counter("requests_total", requests, c.failed, {{"event", "failed"}});
  list.Counter("requests_total", requests, c.cancelled, {{"event", "cancelled"}});
  list.Counter("requests_total", requests, c.expired, {{"event", "expired"}});
  list.Counter("tokens_total", "Prompt tokens computed.", c.prompt_tokens, {{"kind", "prompt"}});
  list.Counter("steps_total", "Steps of the engine.", c.steps);
  const char* results = "Hand-offs sent, by result.";
  list.Counter("handoffs_total", results, c.handoffs_ok, {{"result", "OK"}});
  for (const auto& [reason, count] : c.handoffs_failed) {
    list.Counter("handoffs_total", results, count, {{"result", reason}});
  }
  list.Counter("handoff_bytes_total", "Payload of complete hand-offs.", c.handoff_bytes);
  list.Counter("handoff_seconds_total", "Manifest to verdict, summed over complete hand-offs.",
               c.handoff_seconds);
  list.Counter("stale_events_total", "Transfer results of ended requests.", c.stale_events);
  const char* held = "Requests held, by state.";
  list.Gauge("requests", held, engine_->running(), {{"state", "running"}});
  list.Gauge("requests", held, engine_->waiting(), {{"state", "waiting"}});
  list.Gauge("requests", held, sending(), {{"state", "sending"}});
  list.Gauge("waiting_tokens", "Prompt tokens not yet computed.", engine_->waiting_tokens());
  list.Gauge("tokens_per_second", "Recent compute rate.", rate_.value());
  list.Pools(engine_->pools());
  return list.Take();
}

}  // namespace deltamesh
