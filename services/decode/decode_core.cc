#include "services/decode/decode_core.h"

#include <algorithm>
#include <map>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_types.h"
#include "services/decode/step_messages.h"
#include "services/worker/metric_list.h"

namespace deltamesh {
namespace {

// The router chose this worker for what it was to fetch. Without it another one may be better.
absl::Status NotFetched() {
  return absl::AbortedError("the state was not to be had; the prompt goes back to the router");
}

}  // namespace

struct DecodeCore::Request : AdmittedRequest {
  mesh::StartDecode start;
  KeptPrompt prompt;
  StateLoadRef load;  // its state is read from the store
  int64_t handoffs_refused = 0;
  int64_t handed_restored = 0;  // positions of the state that came, restored by who sent it
  int64_t generated = 0;

  int64_t cached() const { return prompt.restored + handed_restored; }
  bool landing() const { return transfer != 0; }
  bool loading() const { return load != nullptr; }  // nor fetching: running
};

DecodeCore::DecodeCore(const DecodeOptions& options, mesh::Register registration, Engine* engine,
                       const TransferEnds& ends, std::function<void(const mesh::MeshView&)> on_view)
    : options_(options),
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
      requests_({.name = "decode",
                 .requests_max = options.requests_max,
                 .end_transfer = [receiver =
                                      ends.receiver](const RequestId& id) { receiver->Revoke(id); },
                 .end_fetch = [this](const RequestId& id) { fetches_.Cancel(id); },
                 .doing = [](const Request& request) -> std::string_view {
                   if (request.loading()) return "its state was read from the store";
                   if (request.fetching) return "its state was fetched from another worker";
                   return request.landing() ? "it was waiting for its state" : "it was running";
                 }},
                &links_, engine) {}

DecodeCore::~DecodeCore() = default;

// ---- links ---------------------------------------------------------------------------------------

void DecodeCore::OnLinkOpened(LinkId link, absl::Time) { links_.Open(link); }

void DecodeCore::OnLinkClosed(LinkId link, absl::Time) {
  requests_.CancelAllOf(link);
  teller_.End(link);
  sessions_.OnLinkClosed(link);
  links_.Close(link);
}

void DecodeCore::OnRouterMessage(LinkId link, const mesh::RouterMessage& message, absl::Time now) {
  switch (message.body_case()) {
    case mesh::RouterMessage::kRegistered:
      links_.OnRegistered(link, message.registered(), now);
      teller_.Begin(link);
      break;
    case mesh::RouterMessage::kView:
      if (auto view = links_.OnView(link, message.view()); view && on_view_) on_view_(*view);
      break;
    case mesh::RouterMessage::kCancel:
      OnCancel(link, message.cancel().request_id(), now);
      break;
    case mesh::RouterMessage::kStartDecode:
      OnStartDecode(link, message.start_decode(), now);
      break;
    case mesh::RouterMessage::kStartPrefill:
      requests_.Refuse(link, message.start_prefill(),
                       FailedPrecondition("%s is a decode worker; it runs no prefill",
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

// The client has all it wants of the answer, or left: the conversation goes on from what was said by then,
// just as from an answer that ended by itself. Tokens that nobody took may have passed another block
// boundary; what stands there is found by nobody and goes first.
void DecodeCore::OnCancel(LinkId link, const RequestId& id, absl::Time now) {
  Request* request = requests_.Find(id);
  if (request != nullptr && request->link == link) prefixes_.KeepAnswer(&request->prompt, now);
  requests_.Cancel(link, id);
}

// ---- admission -----------------------------------------------------------------------------------

void DecodeCore::OnStartDecode(LinkId link, const mesh::StartDecode& message, absl::Time now) {
  requests_.Start(link, message, now, [&](Request& request) {
    RETURN_IF_ERROR(CheckStart(message));
    request.start = message;
    return Admit(request, now);
  });
}

absl::Status DecodeCore::CheckStart(const mesh::StartDecode& message) const {
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

absl::Status DecodeCore::Admit(Request& request, absl::Time now) {
  const auto& prompt = request.start.prompt();
  const int64_t reach = (prompt.size() - 1) / kBlockTokens * kBlockTokens;
  prefixes_.Open(request.start.cache(), {prompt.data(), static_cast<size_t>(prompt.size())}, reach,
                 &request.prompt);
  // The whole answer's blocks are taken with what arrives, so that Run cannot find the pools full.
  const int64_t tokens =
      std::min<int64_t>(request.start.prompt_size() + int64_t{request.start.max_tokens()},
                        engine_->options().context_tokens_max);
  if (request.start.handoff_tokens() == 0) {
    if (request.start.has_fetch()) {
      const FetchBegun begun =
          fetches_.Begin(&request, request.prompt, request.start.fetch(), tokens, now);
      if (begun == FetchBegun::kAsked) return absl::OkStatus();
      if (begun == FetchBegun::kRefused) return NotFetched();
    }
    return LoadOrRun(request, now);
  }
  std::vector<SlotRef> held = prefixes_.Latents(request.prompt);
  held.resize(
      std::min(held.size(), static_cast<size_t>(request.start.handoff_tokens() / kBlockTokens)));
  ASSIGN_OR_RETURN(HandoffBuffers buffers,
                   HandoffBuffers::Reserve(engine_->pools(), tokens, std::move(held)));
  return GrantLanding(request, std::move(buffers));
}

absl::Status DecodeCore::GrantLanding(Request& request, HandoffBuffers buffers) {
  HandoffGrant grant;
  grant.request_id = request.id;
  grant.serial = requests_.OpenTransfer(request);
  grant.position = static_cast<int64_t>(request.start.handoff_tokens());
  grant.buffers = std::move(buffers);
  grant.deadline = request.deadline;
  ASSIGN_OR_RETURN(mesh::Landing landing, ends_.receiver->Grant(std::move(grant)));

  mesh::WorkerMessage message;
  message.mutable_landing_granted()->set_request_id(request.id);
  message.mutable_landing_granted()->set_attempt(request.attempt);
  *message.mutable_landing_granted()->mutable_landing() = std::move(landing);
  links_.Send(request.link, std::move(message));
  return absl::OkStatus();
}

absl::Status DecodeCore::Run(Request& request, std::unique_ptr<SequenceState> state,
                             absl::Time now) {
  SequenceSpec spec;
  spec.request = request.id;
  spec.prompt.assign(request.start.prompt().begin(), request.start.prompt().end());
  if (state == nullptr) {
    RETURN_IF_ERROR(prefixes_.Restore(&request.prompt, &spec, now));
  } else if (request.start.handoff_tokens() == 0) {
    RETURN_IF_ERROR(prefixes_.Adopt(&request.prompt, std::move(state), &spec, now));
  } else {
    spec.state = std::move(state);
  }
  prefixes_.WatchAnswer(&request.prompt, &spec);
  spec.sampling = ToParams(request.start.sampling());
  spec.max_tokens = request.start.max_tokens();
  spec.stop_tokens.assign(request.start.stop_token_ids().begin(),
                          request.start.stop_token_ids().end());
  RETURN_IF_ERROR(requests_.AddSequence(request, std::move(spec)));
  request.transfer = 0;
  return absl::OkStatus();
}

absl::Status DecodeCore::LoadOrRun(Request& request, absl::Time now) {
  request.load = prefixes_.Load(request.prompt, steps_.prompt_tokens_per_second(), now);
  return request.loading() ? absl::OkStatus() : Run(request, nullptr, now);
}

void DecodeCore::RunArrived(absl::Time now) {
  for (FetchEnded& fetched : fetches_.TakeEnded()) {
    Request* request = requests_.Find(fetched.request);
    if (request == nullptr || !request->fetching) continue;
    request->fetching = false;
    const absl::Status status =
        fetched.state == nullptr ? NotFetched() : Run(*request, std::move(fetched.state), now);
    if (!status.ok()) requests_.Fail(*request, status);
  }
  std::vector<RequestId> ended;
  requests_.ForEach([&](const Request& request) {
    if (request.loading() && prefixes_.Ended(request.load, now)) ended.push_back(request.id);
  });
  for (const RequestId& id : ended) {
    Request* request = requests_.Find(id);
    request->load = nullptr;
    const absl::Status status = Run(*request, nullptr, now);
    if (!status.ok()) requests_.Fail(*request, status);
  }
}

// ---- hand-offs -----------------------------------------------------------------------------------

void DecodeCore::OnHandoffSent(const HandoffSent& result, absl::Time) {
  served_.OnHandoffSent(result);
}

void DecodeCore::OnFetchEvent(const FetchEvent& event, absl::Time now) {
  HandleFetchEvent(event, now, fetches_, served_);
}

void DecodeCore::OnHandoffEvent(HandoffEvent event, absl::Time now) {
  if (fetches_.OnHandoffEvent(event, now)) return;
  if (auto* completed = std::get_if<HandoffCompleted>(&event)) {
    OnCompleted(std::move(*completed), now);
  } else {
    OnRefused(std::get<HandoffRefused>(std::move(event)));
  }
}

void DecodeCore::OnCompleted(HandoffCompleted event, absl::Time now) {
  Request* request = requests_.FindTransfer(event.request_id, event.serial);
  if (request == nullptr) return;
  handoffs_.Completed(event.bytes, event.seconds);
  LogInfo("handoff.complete", {{"request", event.request_id},
                               {"attempt", request->attempt},
                               {"bytes", event.bytes},
                               {"seconds", event.seconds}});
  SendHandoffResult(*request, absl::OkStatus(), std::string(ReasonName(mesh::NONE)), event.bytes,
                    event.seconds);
  request->handed_restored = event.restored_tokens;
  prefixes_.KeepArrived(request->prompt, *event.state, now);
  const absl::Status status = Run(*request, std::move(event.state), now);
  if (!status.ok()) requests_.Fail(*request, status);
}

void DecodeCore::OnRefused(HandoffRefused event) {
  Request* request = requests_.FindTransfer(event.request_id, event.serial);
  if (request == nullptr) return;
  const std::string name(ReasonName(event.reason));
  handoffs_.Failed(name);
  LogWarning("handoff.refused", {{"request", event.request_id},
                                 {"attempt", request->attempt},
                                 {"reason", name},
                                 {"detail", event.detail}});
  const absl::Status cause(ReasonCode(event.reason), absl::StrFormat("%s: %s", name, event.detail));
  SendHandoffResult(*request, cause, MessageOf(cause), event.bytes, event.seconds);
  if (!event.retryable) return requests_.Fail(*request, cause);
  if (++request->handoffs_refused >= options_.handoffs_max) {
    return requests_.Fail(
        *request, Annotate(cause, absl::StrFormat("%d hand-offs were refused, the last one with",
                                                  request->handoffs_refused)));
  }
  ++request->attempt;
  const absl::Status status = GrantLanding(*request, std::move(event.buffers));
  if (!status.ok()) requests_.Fail(*request, status);
}

void DecodeCore::SendHandoffResult(const Request& request, const absl::Status& status,
                                   const std::string& reason, uint64_t bytes, double seconds) {
  mesh::WorkerMessage message;
  mesh::HandoffResult* result = message.mutable_handoff_result();
  result->set_request_id(request.id);
  result->set_attempt(request.attempt);
  result->set_code(static_cast<int>(status.code()));
  result->set_reason(SafeMessage(reason));
  result->set_bytes(bytes);
  result->set_seconds(seconds);
  links_.Send(request.link, std::move(message));
}

// ---- time ----------------------------------------------------------------------------------------

bool DecodeCore::Step(absl::Time now) {
  prefixes_.SetTime(now);
  prefixes_.Poll(now);
  RunArrived(now);
  const bool sends = served_.Step(now);
  const std::optional<StepReport> report = steps_.Step(now);
  if (report) Relay(*report, now);
  teller_.Tell(links_);
  sessions_.Step(now);
  return report.has_value() || sends;
}

void DecodeCore::Relay(const StepReport& report, absl::Time now) {
  std::map<LinkId, mesh::WorkerMessage> messages;  // one per router
  for (const SequenceOutput& output : report.outputs) {
    Request* request = requests_.FindSequence(output.id);
    if (request == nullptr) continue;
    if (!output.error.ok()) {
      requests_.Fail(*request, output.error);
      continue;
    }
    generated_tokens_ += output.tokens.size();
    request->generated += static_cast<int64_t>(output.tokens.size());
    mesh::SequenceOutput* to = messages[request->link].mutable_outputs()->add_sequences();
    to->set_request_id(request->id);
    to->set_attempt(request->attempt);
    to->set_cached_tokens(static_cast<uint64_t>(request->cached()));
    FillOutput(output, request->start.sampling().logprobs() >= 0, to);
    for (const TokenOutput& token : output.tokens)
      prefixes_.Generated(&request->prompt, {&token.token, 1});
    if (output.finish == FinishKind::kRunning) continue;
    prefixes_.KeepAnswer(&request->prompt, now);
    LogInfo("decode.finished", {{"request", request->id},
                                {"prompt_tokens", request->start.prompt_size()},
                                {"handoff_tokens", request->start.handoff_tokens()},
                                {"cached", request->cached()},
                                {"generated", request->generated},
                                {"seconds", absl::ToDoubleSeconds(now - request->admitted)}});
    requests_.Finish(*request);
  }
  for (auto& [link, message] : messages) links_.Send(link, std::move(message));
}

void DecodeCore::Tick(absl::Time now) {
  ends_.receiver->Tick(now);
  ends_.sender->Tick(now);
  fetches_.Tick(now);
  requests_.Expire(now);
  prefixes_.SetTime(now);
  prefixes_.Poll(now);
  RunArrived(now);
  teller_.Tell(links_);
  sessions_.Step(now);
  links_.Tick(load(), now);
}

void DecodeCore::Drain(absl::Time) {
  requests_.Drain();
  links_.HeartbeatSoon();
}

// ---- what others see -----------------------------------------------------------------------------

bool DecodeCore::Idle() const {
  return requests_.empty() && served_.open() == 0 && sessions_.idle();
}

int64_t DecodeCore::landing() const {
  int64_t landing = 0;
  requests_.ForEach([&](const Request& request) { landing += request.landing(); });
  return landing;
}

int64_t DecodeCore::loading() const {
  int64_t loading = 0;
  requests_.ForEach([&](const Request& request) { loading += request.loading(); });
  return loading;
}

mesh::Heartbeat DecodeCore::load() {
  mesh::Heartbeat load = steps_.Load(requests_.draining());
  prefixes_.AddReclaimable(&load);
  prefixes_.AddStoreRates(&load);
  load.set_waiting(load.waiting() + static_cast<uint64_t>(landing() + loading() + fetches_.open()));
  return load;
}

std::vector<MetricSample> DecodeCore::Metrics() const {
  MetricList list;
  requests_.AddMetrics(list);
  steps_.AddMetrics(list);
  const char* tokens = "Tokens: of prompts computed here, and generated.";
  list.Counter("tokens_total", tokens, steps_.prompt_tokens(), {{"kind", "prompt"}});
  list.Counter("tokens_total", tokens, generated_tokens_, {{"kind", "generated"}});
  prefixes_.AddMetrics(list);
  sessions_.AddMetrics(list);
  handoffs_.AddMetrics({.results = "Hand-offs received, by result.",
                        .seconds = "First segment to last, summed over complete hand-offs."},
                       list);
  list.Gauge("requests", kHeldHelp, landing(), {{"state", "landing"}});
  fetches_.AddMetrics(list);
  served_.AddMetrics(list);
  list.Gauge("requests", kHeldHelp, loading(), {{"state", "loading"}});
  return list.Take();
}

}  // namespace deltamesh
