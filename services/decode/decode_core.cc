#include "services/decode/decode_core.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_types.h"
#include "services/worker/metric_list.h"

namespace deltamesh {
namespace {

SamplingParams ToParams(const mesh::Sampling& from) {
  SamplingParams to;
  to.temperature = from.temperature();
  to.top_p = from.top_p();
  to.top_k = static_cast<int32_t>(from.top_k());
  to.min_p = from.min_p();
  to.repetition_penalty = from.repetition_penalty();
  to.presence_penalty = from.presence_penalty();
  to.frequency_penalty = from.frequency_penalty();
  to.logit_bias.assign(from.logit_bias().begin(), from.logit_bias().end());
  std::sort(to.logit_bias.begin(), to.logit_bias.end());  // a map has no order of its own
  to.seed = from.seed();
  to.logprobs = from.logprobs();
  return to;
}

mesh::SequenceOutput::End ToEnd(FinishKind kind) {
  switch (kind) {
    case FinishKind::kRunning:
      return mesh::SequenceOutput::RUNNING;
    case FinishKind::kStopToken:
      return mesh::SequenceOutput::STOP_TOKEN;
    case FinishKind::kMaxTokens:
      return mesh::SequenceOutput::MAX_TOKENS;
    case FinishKind::kContextLimit:
      return mesh::SequenceOutput::CONTEXT_LIMIT;
    case FinishKind::kPrefilled:
      break;
  }
  CHECK(false, "a generating sequence ended as a prefill");
}

void FillOutput(const SequenceOutput& from, uint32_t attempt, bool scores,
                mesh::SequenceOutput* to) {
  to->set_attempt(attempt);
  to->set_first_index(static_cast<uint64_t>(from.first_index));
  to->set_end(ToEnd(from.finish));
  for (const TokenOutput& token : from.tokens) {
    to->add_tokens(token.token);
    if (!scores) continue;
    mesh::TokenScores* score = to->add_scores();
    score->set_logprob(token.logprob);
    for (const auto& [id, logprob] : token.top) {
      score->add_top_ids(id);
      score->add_top_logprobs(logprob);
    }
  }
}

absl::Time DeadlineOf(uint64_t unix_ns) {
  return unix_ns == 0 ? absl::InfiniteFuture() : absl::FromUnixNanos(static_cast<int64_t>(unix_ns));
}

}  // namespace

struct DecodeCore::Request {
  LinkId link = 0;
  mesh::StartDecode start;  // `attempt` in it is the current one
  absl::Time deadline = absl::InfiniteFuture();
  uint32_t grant_serial = 0;  // of the open landing; 0: running
  int64_t handoffs_refused = 0;
  absl::Time admitted;
  int64_t generated = 0;
  SequenceId sequence;  // when running

  bool landing() const { return grant_serial != 0; }
};

DecodeCore::DecodeCore(const DecodeOptions& options, mesh::Register registration, Engine* engine,
                       HandoffReceiver* receiver,
                       std::function<void(const mesh::MeshView&)> on_view)
    : options_(options),
      engine_(engine),
      receiver_(receiver),
      on_view_(std::move(on_view)),
      links_(std::move(registration)) {}

DecodeCore::~DecodeCore() {
  while (!requests_.empty()) Free(requests_.begin());
}

// ---- links ---------------------------------------------------------------------------------------

void DecodeCore::OnLinkOpened(LinkId link, absl::Time) { links_.Open(link); }

void DecodeCore::OnLinkClosed(LinkId link, absl::Time) {
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

void DecodeCore::OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) {
  switch (message.body_case()) {
    case mesh::RouterMessage::kRegistered:
      links_.OnRegistered(link, message.registered(), now);
      break;
    case mesh::RouterMessage::kView:
      if (auto view = links_.OnView(link, message.view()); view && on_view_) on_view_(*view);
      break;
    case mesh::RouterMessage::kStartDecode:
      OnStartDecode(link, message.start_decode(), now);
      break;
    case mesh::RouterMessage::kCancel: {
      auto it = requests_.find(message.cancel().request_id());
      if (it == requests_.end() || it->second->link != link) break;
      ++counters_.cancelled;
      LogInfo("decode.cancelled", {{"request", it->first}});
      Free(it);
      break;
    }
    case mesh::RouterMessage::kStartPrefill:
      SendFailed(link, message.start_prefill().request_id(), message.start_prefill().attempt(),
                 FailedPrecondition("%s is a decode worker; it runs no prefill",
                                    links_.registration().name()));
      break;
    case mesh::RouterMessage::BODY_NOT_SET:
      break;
  }
}

// ---- admission -----------------------------------------------------------------------------------

void DecodeCore::OnStartDecode(LinkId link, const mesh::StartDecode& message, absl::Time now) {
  if (auto it = requests_.find(message.request_id());
      it != requests_.end() && it->second->link == link) {
    Free(it);  // the router starts it anew
  }
  absl::Status status = CheckStart(link, message);
  if (status.ok()) {
    auto request = std::make_unique<Request>();
    request->link = link;
    request->start = message;
    request->deadline = DeadlineOf(message.deadline_unix_ns());
    request->admitted = now;
    Request& placed = *(requests_[message.request_id()] = std::move(request));
    status = Admit(placed);
    if (!status.ok()) Free(requests_.find(message.request_id()));
  }
  if (status.ok()) {
    ++counters_.started;
    return;
  }
  ++counters_.refused;
  SendFailed(link, message.request_id(), message.attempt(), status);
}

absl::Status DecodeCore::CheckStart(LinkId link, const mesh::StartDecode& message) const {
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
  const int64_t prompt = message.prompt_size();
  const int64_t handoff = static_cast<int64_t>(message.handoff_tokens());
  if (prompt == 0) return InvalidArgument("prompt: is empty");
  if (message.max_tokens() == 0) return InvalidArgument("max_tokens: is 0; use at least 1");
  if (prompt + 1 > engine_->options().context_tokens_max) {
    return InvalidArgument("prompt: %d tokens and an answer; at most %d fit the context", prompt,
                           engine_->options().context_tokens_max);
  }
  if (handoff % kBlockTokens != 0 || handoff < 0 || handoff >= prompt) {
    return InvalidArgument("handoff_tokens: %d is not a multiple of %d below the prompt's %d",
                           handoff, kBlockTokens, prompt);
  }
  return absl::OkStatus();
}

absl::Status DecodeCore::Admit(Request& request) {
  if (request.start.handoff_tokens() == 0) return Run(request, nullptr);
  // The whole answer's blocks are taken now, so that Run cannot find the pools full.
  const int64_t tokens =
      std::min<int64_t>(request.start.prompt_size() + int64_t{request.start.max_tokens()},
                        engine_->options().context_tokens_max);
  ASSIGN_OR_RETURN(HandoffBuffers buffers, HandoffBuffers::Reserve(engine_->pools(), tokens));
  return GrantLanding(request, std::move(buffers));
}

absl::Status DecodeCore::GrantLanding(Request& request, HandoffBuffers buffers) {
  HandoffGrant grant;
  grant.request_id = request.start.request_id();
  grant.serial = request.grant_serial = next_serial_++;
  grant.position = static_cast<int64_t>(request.start.handoff_tokens());
  grant.buffers = std::move(buffers);
  grant.deadline = request.deadline;
  ASSIGN_OR_RETURN(mesh::Landing landing, receiver_->Grant(std::move(grant)));

  mesh::WorkerMessage message;
  message.mutable_landing_granted()->set_request_id(request.start.request_id());
  message.mutable_landing_granted()->set_attempt(request.start.attempt());
  *message.mutable_landing_granted()->mutable_landing() = std::move(landing);
  links_.Send(request.link, std::move(message));
  return absl::OkStatus();
}

absl::Status DecodeCore::Run(Request& request, std::unique_ptr<SequenceState> state) {
  SequenceSpec spec;
  spec.request = request.start.request_id();
  spec.prompt.assign(request.start.prompt().begin(), request.start.prompt().end());
  spec.state = std::move(state);
  spec.sampling = ToParams(request.start.sampling());
  spec.max_tokens = request.start.max_tokens();
  spec.stop_tokens.assign(request.start.stop_token_ids().begin(),
                          request.start.stop_token_ids().end());
  ASSIGN_OR_RETURN(request.sequence, engine_->Add(std::move(spec)));
  request.grant_serial = 0;
  by_sequence_[request.sequence] = request.start.request_id();
  return absl::OkStatus();
}

// ---- hand-offs -----------------------------------------------------------------------------------

void DecodeCore::OnHandoffEvent(HandoffEvent event, absl::Time) {
  if (auto* completed = std::get_if<HandoffCompleted>(&event)) {
    OnCompleted(std::move(*completed));
  } else {
    OnRefused(std::get<HandoffRefused>(std::move(event)));
  }
}

DecodeCore::Request* DecodeCore::FindLanding(const RequestId& id, uint32_t serial) {
  auto it = requests_.find(id);
  if (it != requests_.end() && it->second->landing() && it->second->grant_serial == serial) {
    return it->second.get();
  }
  ++counters_.stale_events;
  return nullptr;
}

void DecodeCore::OnCompleted(HandoffCompleted event) {
  Request* request = FindLanding(event.request_id, event.serial);
  if (request == nullptr) return;
  ++counters_.handoffs_ok;
  counters_.handoff_bytes += event.bytes;
  counters_.handoff_seconds += event.seconds;
  LogInfo("handoff.complete", {{"request", event.request_id},
                               {"attempt", request->start.attempt()},
                               {"bytes", event.bytes},
                               {"seconds", event.seconds}});
  SendHandoffResult(*request, absl::OkStatus(), std::string(ReasonName(mesh::NONE)), event.bytes,
                    event.seconds);
  const absl::Status status = Run(*request, std::move(event.state));
  if (!status.ok()) Fail(event.request_id, status);
}

void DecodeCore::OnRefused(HandoffRefused event) {
  Request* request = FindLanding(event.request_id, event.serial);
  if (request == nullptr) return;
  const std::string name(ReasonName(event.reason));
  ++counters_.handoffs_refused[name];
  LogWarning("handoff.refused", {{"request", event.request_id},
                                 {"attempt", request->start.attempt()},
                                 {"reason", name},
                                 {"detail", event.detail}});
  const absl::Status cause(ReasonCode(event.reason), absl::StrFormat("%s: %s", name, event.detail));
  SendHandoffResult(*request, cause, MessageOf(cause), event.bytes, event.seconds);
  if (!event.retryable) return Fail(event.request_id, cause);
  if (++request->handoffs_refused >= options_.handoffs_max) {
    return Fail(event.request_id,
                Annotate(cause, absl::StrFormat("%d hand-offs were refused, the last one with",
                                                request->handoffs_refused)));
  }
  request->start.set_attempt(request->start.attempt() + 1);
  const absl::Status status = GrantLanding(*request, std::move(event.buffers));
  if (!status.ok()) Fail(event.request_id, status);
}

void DecodeCore::SendHandoffResult(const Request& request, const absl::Status& status,
                                   const std::string& reason, uint64_t bytes, double seconds) {
  mesh::WorkerMessage message;
  mesh::HandoffResult* result = message.mutable_handoff_result();
  result->set_request_id(request.start.request_id());
  result->set_attempt(request.start.attempt());
  result->set_code(static_cast<int>(status.code()));
  result->set_reason(SafeMessage(reason));
  result->set_bytes(bytes);
  result->set_seconds(seconds);
  links_.Send(request.link, std::move(message));
}

// ---- the end of a request ------------------------------------------------------------------------

void DecodeCore::Free(RequestMap::iterator it) {
  Request& request = *it->second;
  if (request.landing()) receiver_->Revoke(it->first);
  if (request.sequence.value != 0) {
    by_sequence_.erase(request.sequence);
    engine_->Remove(request.sequence);
  }
  requests_.erase(it);
}

void DecodeCore::Fail(const RequestId& id, const absl::Status& status) {
  auto it = requests_.find(id);
  if (it == requests_.end()) return;
  ++counters_.failed;
  const LinkId link = it->second->link;
  const uint32_t attempt = it->second->start.attempt();
  const RequestId name = it->first;  // `id` may live in the entry
  Free(it);
  SendFailed(link, name, attempt, status);
}

void DecodeCore::SendFailed(LinkId link, const RequestId& id, uint32_t attempt,
                            const absl::Status& status) {
  LogWarning("decode.failed",
             {{"request", id}, {"attempt", attempt}, {"error", status.ToString()}});
  mesh::WorkerMessage message;
  mesh::RequestFailed* failed = message.mutable_failed();
  failed->set_request_id(id);
  failed->set_attempt(attempt);
  failed->set_code(static_cast<int>(status.code()));
  failed->set_message(SafeMessage(status));
  links_.Send(link, std::move(message));
}

// ---- time ----------------------------------------------------------------------------------------

bool DecodeCore::Step(absl::Time now) {
  if (!engine_->HasWork()) {
    rate_.Idle();
    return false;
  }
  rate_.StepBegins(now);
  const StepReport report = engine_->Step();
  rate_.StepEnded(report.tokens);
  ++counters_.steps;
  counters_.prompt_tokens += static_cast<uint64_t>(report.prompt_tokens);
  Relay(report, now);
  return true;
}

void DecodeCore::Relay(const StepReport& report, absl::Time now) {
  std::map<LinkId, mesh::WorkerMessage> messages;  // one per router
  for (const SequenceOutput& output : report.outputs) {
    auto found = by_sequence_.find(output.id);
    if (found == by_sequence_.end()) continue;
    const RequestId id = found->second;
    if (!output.error.ok()) {
      Fail(id, output.error);
      continue;
    }
    auto it = requests_.find(id);
    CHECK(it != requests_.end());
    counters_.generated_tokens += output.tokens.size();
    it->second->generated += static_cast<int64_t>(output.tokens.size());
    mesh::SequenceOutput* to = messages[it->second->link].mutable_outputs()->add_sequences();
    to->set_request_id(id);
    const mesh::StartDecode& start = it->second->start;
    FillOutput(output, start.attempt(), start.sampling().logprobs() >= 0, to);
    if (output.finish == FinishKind::kRunning) continue;
    ++counters_.finished;
    LogInfo("decode.finished", {{"request", id},
                                {"prompt_tokens", it->second->start.prompt_size()},
                                {"handoff_tokens", it->second->start.handoff_tokens()},
                                {"generated", it->second->generated},
                                {"seconds", absl::ToDoubleSeconds(now - it->second->admitted)}});
    Free(it);
  }
  for (auto& [link, message] : messages) links_.Send(link, std::move(message));
}

void DecodeCore::Tick(absl::Time now) {
  receiver_->Tick(now);
  std::vector<RequestId> expired;
  for (const auto& [id, request] : requests_) {
    if (request->deadline <= now) expired.push_back(id);
  }
  for (const RequestId& id : expired) {
    ++counters_.expired;
    Fail(id, DeadlineExceeded("the request's deadline passed while it was %s",
                              requests_.at(id)->landing() ? "waiting for its state" : "running"));
  }
  links_.Tick(load(), now);
}

void DecodeCore::Drain(absl::Time) {
  draining_ = true;
  links_.HeartbeatSoon();
}

// ---- what others see -----------------------------------------------------------------------------

int64_t DecodeCore::landing() const {
  return std::count_if(requests_.begin(), requests_.end(),
                       [](const auto& entry) { return entry.second->landing(); });
}

mesh::Heartbeat DecodeCore::load() const {
  mesh::Heartbeat load;
  load.set_slabs_free(static_cast<uint64_t>(engine_->pools().slabs->free_slots()));
  load.set_latent_blocks_free(static_cast<uint64_t>(engine_->pools().blocks->free_slots()));
  load.set_running(static_cast<uint64_t>(engine_->running()));
  load.set_waiting(static_cast<uint64_t>(engine_->waiting() + landing()));
  load.set_waiting_tokens(static_cast<uint64_t>(engine_->waiting_tokens()));
  load.set_tokens_per_second(rate_.value());
  load.set_draining(draining_);
  return load;
}

std::vector<MetricSample> DecodeCore::Metrics() const {
  const Counters& c = counters_;
  MetricList list;
  const char* requests = "Requests by what happened to them here; refused ones were never started.";
  list.Counter("requests_total", requests, c.started, {{"event", "started"}});
  list.Counter("requests_total", requests, c.refused, {{"event", "refused"}});
  list.Counter("requests_total", requests, c.finished, {{"event", "finished"}});
  list.Counter("requests_total", requests, c.failed, {{"event", "failed"}});
  list.Counter("requests_total", requests, c.cancelled, {{"event", "cancelled"}});
  list.Counter("requests_total", requests, c.expired, {{"event", "expired"}});
  const char* tokens = "Tokens: of prompts computed here, and generated.";
  list.Counter("tokens_total", tokens, c.prompt_tokens, {{"kind", "prompt"}});
  list.Counter("tokens_total", tokens, c.generated_tokens, {{"kind", "generated"}});
  list.Counter("steps_total", "Steps of the engine.", c.steps);
  const char* results = "Hand-offs received, by result.";
  list.Counter("handoffs_total", results, c.handoffs_ok, {{"result", "OK"}});
  for (const auto& [reason, count] : c.handoffs_refused) {
    list.Counter("handoffs_total", results, count, {{"result", reason}});
  }
  list.Counter("handoff_bytes_total", "Payload of complete hand-offs.", c.handoff_bytes);
  list.Counter("handoff_seconds_total", "First segment to last, summed over complete hand-offs.",
               c.handoff_seconds);
  list.Counter("stale_events_total", "Transfer events of ended requests.", c.stale_events);
  const char* held = "Requests held, by state.";
  list.Gauge("requests", held, landing(), {{"state", "landing"}});
  list.Gauge("requests", held, engine_->running(), {{"state", "running"}});
  list.Gauge("requests", held, engine_->waiting(), {{"state", "waiting"}});
  list.Gauge("waiting_tokens", "Prompt tokens not yet computed.", engine_->waiting_tokens());
  list.Gauge("tokens_per_second", "Recent compute rate.", rate_.value());
  list.Pools(engine_->pools());
  return list.Take();
}

}  // namespace deltamesh
