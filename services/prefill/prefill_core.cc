#include "services/prefill/prefill_core.h"

#include <utility>

#include "runtime/base/log.h"
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

struct PrefillCore::Request : AdmittedRequest {
  KeptPrompt prompt;
  std::vector<TokenId> tokens;                // until they are computed
  StateLoadRef load;                          // its state is read from the store
  std::unique_ptr<SequenceState> whole = {};  // all of it was restored: there is nothing to compute
  int64_t position = 0;
  double compute_seconds = 0;  // admission to the last step's end
  int64_t blocks_sent = 0;     // leading blocks given to the sender

  bool loading() const { return load != nullptr; }
  bool computed() const { return sequence.value == 0 && !loading() && !fetching; }
};

PrefillCore::PrefillCore(PrefillOptions options, mesh::Register registration, Engine* engine,
                         const TransferEnds& ends,
                         std::function<void(const mesh::MeshView&)> on_view)
    : options_(std::move(options)),
      engine_(engine),
      ends_(ends),
      on_view_(std::move(on_view)),
      links_(std::move(registration)),
      steps_(engine),
      prefixes_(options_.cache, options_.tier, links_.registration().model()),
      fetches_(options_.fetch, engine->pools(), &prefixes_, ends, &links_),
      served_(options_.fetch, options_.cache, options_.tier, &links_.registration(), ends),
      teller_(options_.cache, options_.tier),
      sessions_(options_.tier, &links_),
      requests_(
          {.name = "prefill",
           .requests_max = options_.requests_max,
           .end_transfer = [sender = ends.sender](const RequestId& id) { sender->Cancel(id); },
           .end_fetch = [this](const RequestId& id) { fetches_.Cancel(id); },
           .doing = [](const Request& request) -> std::string_view {
             if (request.loading()) return "its state was read from the store";
             if (request.fetching) return "its state was fetched from another worker";
             return request.computed() ? "its prompt was being sent" : "its prompt was computed";
           }},
          &links_, engine) {}

PrefillCore::~PrefillCore() = default;

// ---- links ---------------------------------------------------------------------------------------

void PrefillCore::OnLinkOpened(LinkId link, absl::Time) { links_.Open(link); }

void PrefillCore::OnLinkClosed(LinkId link, absl::Time) {
  requests_.CancelAllOf(link);
  teller_.End(link);
  sessions_.OnLinkClosed(link);
  links_.Close(link);
}

void PrefillCore::OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) {
  switch (message.body_case()) {
    case mesh::RouterMessage::kRegistered:
      links_.OnRegistered(link, message.registered(), now);
      teller_.Begin(link);
      break;
    case mesh::RouterMessage::kView:
      if (auto view = links_.OnView(link, message.view()); view && on_view_) on_view_(*view);
      break;
    case mesh::RouterMessage::kCancel:
      requests_.Cancel(link, message.cancel().request_id());
      break;
    case mesh::RouterMessage::kStartPrefill:
      OnStartPrefill(link, message.start_prefill(), now);
      break;
    case mesh::RouterMessage::kStartDecode:
      requests_.Refuse(link, message.start_decode(),
                       FailedPrecondition("%s is a prefill worker; it generates nothing",
                                          links_.registration().name()));
      break;
    case mesh::RouterMessage::kResyncPrefixes:
      teller_.Begin(link);
      break;
    case mesh::RouterMessage::kSession:
      sessions_.OnCommand(link, message.session(), now);
      break;
    case mesh::RouterMessage::BODY_NOT_SET:
      break;
  }
}

// ---- admission -----------------------------------------------------------------------------------

void PrefillCore::OnStartPrefill(LinkId link, const mesh::StartPrefill& message, absl::Time now) {
  requests_.Start(link, message, now,
                  [&](Request& request) { return Admit(request, message, now); });
}

absl::Status PrefillCore::Admit(Request& request, const mesh::StartPrefill& message,
                                absl::Time now) {
  request.position = static_cast<int64_t>(message.landing().position());
  if (request.position <= 0 || request.position % kBlockTokens != 0 ||
      request.position != message.tokens_size()) {
    return InvalidArgument(
        "landing.position: %d with %d tokens; it must be their number and a "
        "multiple of %d",
        request.position, message.tokens_size(), kBlockTokens);
  }
  request.tokens.assign(message.tokens().begin(), message.tokens().end());
  prefixes_.Open(message.cache(), request.tokens, request.position, &request.prompt);
  if (message.has_fetch())
    fetches_.Begin(&request, request.prompt, message.fetch(), request.position, now);
  // The receiver hears of the transfer at once, however long a state is fetched or read.
  if (!request.fetching) RETURN_IF_ERROR(LoadOrCompute(request, now));
  HandoffStart start;
  start.request_id = request.id;
  start.serial = requests_.OpenTransfer(request);
  start.landing = message.landing();
  start.deadline = request.deadline;
  RETURN_IF_ERROR(ends_.sender->Begin(std::move(start)));
  Computes(request, absl::OkStatus(), now);
  return absl::OkStatus();
}

absl::Status PrefillCore::LoadOrCompute(Request& request, absl::Time now) {
  request.load = prefixes_.Load(request.prompt, steps_.prompt_tokens_per_second(), now);
  return request.loading() ? absl::OkStatus() : Compute(request, nullptr, now);
}

absl::Status PrefillCore::Compute(Request& request, std::unique_ptr<SequenceState> state,
                                  absl::Time now) {
  SequenceSpec spec;
  spec.request = request.id;
  spec.prompt = std::exchange(request.tokens, {});
  spec.stop_at = request.position;
  spec.layer_final = [this, id = request.id](int64_t layer, const SequenceState& state) {
    const int64_t kda = options_.kda_index[static_cast<size_t>(layer)];
    if (kda >= 0) ends_.sender->SendLayer(id, kda, state.slab());
  };
  if (state == nullptr) {
    RETURN_IF_ERROR(prefixes_.Restore(&request.prompt, &spec, now));
  } else {
    RETURN_IF_ERROR(prefixes_.Adopt(&request.prompt, std::move(state), &spec, now));
  }
  if (request.prompt.restored < request.position)
    return requests_.AddSequence(request, std::move(spec));
  request.whole = std::move(spec.state);
  return absl::OkStatus();
}

void PrefillCore::ComputeArrived(absl::Time now) {
  for (FetchEnded& fetched : fetches_.TakeEnded()) {
    Request* request = requests_.Find(fetched.request);
    if (request == nullptr || !request->fetching) continue;
    request->fetching = false;
    Computes(*request,
             fetched.state == nullptr ? LoadOrCompute(*request, now)
                                      : Compute(*request, std::move(fetched.state), now),
             now);
  }
  std::vector<RequestId> ended;
  requests_.ForEach([&](const Request& request) {
    if (request.loading() && prefixes_.Ended(request.load, now)) ended.push_back(request.id);
  });
  for (const RequestId& id : ended) {
    Request* request = requests_.Find(id);
    request->load = nullptr;
    Computes(*request, Compute(*request, nullptr, now), now);
  }
}

void PrefillCore::Computes(Request& request, const absl::Status& status, absl::Time now) {
  if (!status.ok()) return requests_.Fail(request, status);
  ends_.sender->SetRestored(request.id, request.prompt.restored);
  if (request.whole != nullptr) SendRestored(request, now);
}

void PrefillCore::SendRestored(Request& request, absl::Time now) {
  const std::unique_ptr<SequenceState> state = std::move(request.whole);
  SendFullBlocks(request, *state);
  for (int64_t layer = 0; layer < state->layout().kda_layers; ++layer) {
    ends_.sender->SendLayer(request.id, layer, state->slab());
  }
  OnComputed(request, now);
}

// ---- time ----------------------------------------------------------------------------------------

bool PrefillCore::Step(absl::Time now) {
  prefixes_.SetTime(now);
  prefixes_.Poll(now);
  ComputeArrived(now);
  const bool sends = served_.Step(now);
  const std::optional<StepReport> report = steps_.Step(now);
  if (!report) return sends;
  const absl::Time ended = options_.clock != nullptr ? options_.clock->Now() : now;
  for (const SequenceOutput& output : report->outputs) {
    Request* request = requests_.FindSequence(output.id);
    if (request == nullptr) continue;
    if (!output.error.ok()) {
      requests_.Fail(*request, output.error);
    } else if (output.finish == FinishKind::kPrefilled) {
      OnComputed(*request, ended);
    }
  }
  requests_.ForEach([this](Request& request) {
    const SequenceState* state = engine_->state(request.sequence);
    if (state != nullptr) SendFullBlocks(request, *state);
  });
  teller_.Tell(links_);
  sessions_.Step(now);
  return true;
}

void PrefillCore::SendFullBlocks(Request& request, const SequenceState& state) {
  for (; (request.blocks_sent + 1) * kBlockTokens <= state.position(); ++request.blocks_sent) {
    ends_.sender->SendBlock(request.id, request.blocks_sent,
                            state.blocks()[static_cast<size_t>(request.blocks_sent)]);
  }
}

void PrefillCore::OnComputed(Request& request, absl::Time now) {
  if (const SequenceState* state = engine_->state(request.sequence)) {
    SendFullBlocks(request, *state);
  }
  requests_.RemoveSequence(request);

  mesh::WorkerMessage message;
  mesh::PrefillFinished* finished = message.mutable_prefill_finished();
  finished->set_request_id(request.id);
  finished->set_attempt(request.attempt);
  request.compute_seconds = absl::ToDoubleSeconds(now - request.admitted);
  finished->set_seconds(request.compute_seconds);
  links_.Send(request.link, std::move(message));
}

void PrefillCore::Tick(absl::Time now) {
  ends_.sender->Tick(now);
  ends_.receiver->Tick(now);
  fetches_.Tick(now);
  requests_.Expire(now);
  prefixes_.SetTime(now);
  prefixes_.Poll(now);
  ComputeArrived(now);
  teller_.Tell(links_);
  sessions_.Step(now);
  links_.Tick(load(), now);
}

void PrefillCore::Drain(absl::Time) {
  requests_.Drain();
  links_.HeartbeatSoon();
}

// ---- the end of a request ------------------------------------------------------------------------

void PrefillCore::OnHandoffEvent(HandoffEvent event, absl::Time now) {
  fetches_.OnHandoffEvent(event, now);
}

void PrefillCore::OnFetchEvent(const FetchEvent& event, absl::Time now) {
  HandleFetchEvent(event, now, fetches_, served_);
}

void PrefillCore::OnHandoffSent(const HandoffSent& result, absl::Time) {
  if (served_.OnHandoffSent(result)) return;
  Request* request = requests_.FindTransfer(result.request_id, result.serial);
  if (request == nullptr) return;
  if (result.status.ok()) {
    handoffs_.Completed(result.bytes, result.seconds);
    LogInfo("prefill.finished", {{"request", result.request_id},
                                 {"attempt", request->attempt},
                                 {"tokens", request->position},
                                 {"cached", request->prompt.restored},
                                 {"compute_seconds", request->compute_seconds},
                                 {"handoff_seconds", result.seconds},
                                 {"bytes", result.bytes}});
    return requests_.Finish(*request);
  }
  const std::string name(ReasonName(result.reason));
  handoffs_.Failed(name);
  LogWarning("handoff.failed", {{"request", result.request_id},
                                {"attempt", request->attempt},
                                {"reason", name},
                                {"error", result.status.ToString()}});
  // A refusal of a transfer that the receiver has open reaches the router from there, with a new landing.
  // Only what the receiver cannot lay at a request's door is ours to report.
  const bool receiver_reports = result.reason != mesh::NONE && result.reason != mesh::PEER_LOST &&
                                result.reason != mesh::TIMEOUT &&
                                result.reason != mesh::UNKNOWN_TRANSFER &&
                                result.reason != mesh::STALE_EPOCH;
  if (receiver_reports) {
    requests_.FailSilently(*request);
  } else {
    requests_.Fail(*request, result.status);
  }
}

// ---- what others see -----------------------------------------------------------------------------

bool PrefillCore::Idle() const {
  return requests_.empty() && served_.open() == 0 && sessions_.idle();
}

int64_t PrefillCore::sending() const {
  int64_t sending = 0;
  requests_.ForEach([&](const Request& request) { sending += request.computed(); });
  return sending;
}

int64_t PrefillCore::loading() const {
  int64_t loading = 0;
  requests_.ForEach([&](const Request& request) { loading += request.loading(); });
  return loading;
}

mesh::Heartbeat PrefillCore::load() {
  mesh::Heartbeat load = steps_.Load(requests_.draining());
  prefixes_.AddReclaimable(&load);
  prefixes_.AddStoreRates(&load);
  load.set_waiting(load.waiting() + static_cast<uint64_t>(loading() + fetches_.open()));
  return load;
}

std::vector<MetricSample> PrefillCore::Metrics() const {
  MetricList list;
  requests_.AddMetrics(list);
  steps_.AddMetrics(list);
  prefixes_.AddMetrics(list);
  sessions_.AddMetrics(list);
  list.Counter("tokens_total", "Prompt tokens computed.", steps_.prompt_tokens(),
               {{"kind", "prompt"}});
  handoffs_.AddMetrics({.results = "Hand-offs sent, by result.",
                        .seconds = "Manifest to verdict, summed over complete hand-offs."},
                       list);
  list.Gauge("requests", kHeldHelp, sending(), {{"state", "sending"}});
  fetches_.AddMetrics(list);
  served_.AddMetrics(list);
  list.Gauge("requests", kHeldHelp, loading(), {{"state", "loading"}});
  return list.Take();
}

}  // namespace deltamesh
