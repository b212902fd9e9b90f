#include "services/worker/fetch_client.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "runtime/transfer/handoff_types.h"
#include "services/worker/engine_steps.h"

namespace deltamesh {
namespace {

constexpr char kCancelled[] = "CANCELLED";

Refusal Refuse(mesh::RefusalReason reason, std::string detail) {
  return {.reason = reason, .detail = std::move(detail)};
}

}  // namespace

FetchBegun FetchClient::Begin(AdmittedRequest* request, const KeptPrompt& prompt,
                              const mesh::FetchSource& source, int64_t tokens, absl::Time now) {
  const int64_t position = static_cast<int64_t>(source.position());
  if (!prompt.chain || options_.open_max == 0 || prefixes_->Held(prompt) >= position) {
    mesh::WorkerMessage message;
    mesh::FetchResult* result = message.mutable_fetch_result();
    result->set_request_id(request->id);
    result->set_attempt(request->attempt);
    result->set_not_needed(true);
    links_->Send(request->link, std::move(message));
    return FetchBegun::kNotNeeded;
  }
  Cancel(request->id);
  Fetch fetch;
  fetch.request = request->id;
  fetch.link = request->link;
  fetch.attempt = request->attempt;
  fetch.source = source.worker();
  fetch.position = position;
  fetch.began = now;
  fetch.deadline = std::min(request->deadline, now + options_.whole_max);
  // Unlike that of any other transfer, wherever it is known by it.
  const std::string transfer =
      absl::StrFormat("fetch:%s:%d:%s", links_->registration().name(), next_++, request->id);
  const Refusal refusal = Ask(transfer, *request, prompt, source, tokens, &fetch);
  if (!refusal.ok()) {
    ends_.receiver->Revoke(transfer);
    Tell(fetch, refusal, 0, 0, now);
    return FetchBegun::kRefused;
  }
  by_request_[request->id] = transfer;
  open_.emplace(transfer, std::move(fetch));
  request->fetching = true;
  return FetchBegun::kAsked;
}

Refusal FetchClient::Ask(const std::string& transfer, const AdmittedRequest& request,
                         const KeptPrompt& prompt, const mesh::FetchSource& source, int64_t tokens,
                         Fetch* fetch) {
  const int64_t position = fetch->position;
  if (position <= 0 || position % kBlockTokens != 0 || position > prompt.reach) {
    return Refuse(mesh::MALFORMED,
                  absl::StrFormat("a state at %d of a prompt's %d tokens", position, prompt.reach));
  }
  if (open() >= options_.open_max) {
    return Refuse(mesh::BUSY, absl::StrFormat("%d states are being fetched", open()));
  }
  std::vector<SlotRef> held = prefixes_->Latents(prompt);
  held.resize(std::min(held.size(), static_cast<size_t>(position / kBlockTokens)));
  absl::StatusOr<HandoffBuffers> buffers = HandoffBuffers::Reserve(pools_, tokens, std::move(held));
  if (!buffers.ok()) return Refuse(mesh::BUSY, MessageOf(buffers.status()));

  const PrefixKey& key = prompt.path()[static_cast<size_t>(position / kBlockTokens - 1)];
  HandoffGrant grant;
  grant.request_id = transfer;
  grant.position = position;
  grant.buffers = *std::move(buffers);
  grant.deadline = fetch->deadline;
  grant.prefix.assign(key.bytes.begin(), key.bytes.end());
  grant.unclaimed_max = options_.claim_max;
  mesh::StateFetch ask;
  ask.set_prefix(grant.prefix);
  absl::StatusOr<mesh::Landing> landing = ends_.receiver->Grant(std::move(grant));
  if (!landing.ok()) return Refuse(mesh::BUSY, MessageOf(landing.status()));
  fetch->transfer_id = landing->transfer_id();
  fetch->token_low = landing->token_low();
  *ask.mutable_landing() = *std::move(landing);
  ask.set_transfer(transfer);
  ask.set_source_epoch(source.epoch());
  ask.set_model_digest(links_->registration().model().digest());
  ask.set_state_layout(links_->registration().model().state_layout());
  ask.set_deadline_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(fetch->deadline)));
  const absl::StatusOr<PeerId> peer = ends_.fetch->Ask(source.transport_address(), ask);
  if (!peer.ok()) return Refuse(mesh::PEER_LOST, MessageOf(peer.status()));
  fetch->peer = *peer;
  LogInfo("fetch.asked", {{"request", request.id},
                          {"attempt", request.attempt},
                          {"source", source.worker()},
                          {"tokens", position},
                          {"have_blocks", ask.landing().have_blocks()}});
  return {};
}

void FetchClient::Cancel(const RequestId& request) {
  // One that has ended may be about another prompt under the same id.
  std::erase_if(ended_, [&](const FetchEnded& ended) { return ended.request == request; });
  const auto known = by_request_.find(request);
  if (known == by_request_.end()) return;
  ends_.receiver->Revoke(known->second);
  open_.erase(known->second);
  by_request_.erase(known);
  ++results_[kCancelled];
}

bool FetchClient::OnHandoffEvent(HandoffEvent& event, absl::Time now) {
  auto* completed = std::get_if<HandoffCompleted>(&event);
  auto* refused = std::get_if<HandoffRefused>(&event);
  const RequestId& transfer = completed != nullptr ? completed->request_id : refused->request_id;
  const auto it = open_.find(transfer);
  if (it == open_.end()) return false;
  if (completed != nullptr) {
    End(it, {}, std::move(completed->state), completed->bytes, completed->seconds, now);
  } else {
    End(it, {.reason = refused->reason, .detail = refused->detail}, nullptr, 0, 0, now);
  }
  return true;
}

void FetchClient::OnRefused(const FetchRefused& event, absl::Time now) {
  const mesh::StateFetchRefused& r = event.refused;
  for (auto it = open_.begin(); it != open_.end(); ++it) {
    const Fetch& f = it->second;
    if (f.peer != event.peer || f.transfer_id != r.key().transfer_id() ||
        f.token_low != r.key().token_low()) {
      continue;
    }
    ends_.receiver->Revoke(it->first);
    const bool known = mesh::RefusalReason_IsValid(r.reason()) && r.reason() != mesh::NONE;
    return End(it, Refuse(known ? r.reason() : mesh::MALFORMED, r.detail()), nullptr, 0, 0, now);
  }
}

void FetchClient::OnPeerLost(const FetchPeerLost& event, absl::Time now) {
  for (auto it = open_.begin(); it != open_.end();) {
    const auto at = it++;
    if (at->second.peer != event.peer) continue;
    ends_.receiver->Revoke(at->first);
    End(at, Refuse(mesh::PEER_LOST, MessageOf(event.reason)), nullptr, 0, 0, now);
  }
}

void FetchClient::Tick(absl::Time now) {
  for (auto it = open_.begin(); it != open_.end();) {
    const auto at = it++;
    if (now < at->second.deadline) continue;
    ends_.receiver->Revoke(at->first);
    End(at,
        Refuse(mesh::TIMEOUT,
               absl::StrFormat("not whole after %s", absl::FormatDuration(now - at->second.began))),
        nullptr, 0, 0, now);
  }
}

void FetchClient::End(FetchIterator it, const Refusal& refusal,
                      std::unique_ptr<SequenceState> state, uint64_t bytes, double transfer_seconds,
                      absl::Time now) {
  const Fetch fetch = std::move(it->second);
  open_.erase(it);
  by_request_.erase(fetch.request);
  Tell(fetch, refusal, bytes, transfer_seconds, now);
  ended_.push_back({.request = fetch.request, .state = std::move(state)});
}

void FetchClient::Tell(const Fetch& fetch, const Refusal& refusal, uint64_t bytes,
                       double transfer_seconds, absl::Time now) {
  const std::string name(refusal.ok() ? "OK" : ReasonName(refusal.reason));
  const double seconds = absl::ToDoubleSeconds(now - fetch.began);
  ++results_[name];
  mesh::WorkerMessage message;
  mesh::FetchResult* result = message.mutable_fetch_result();
  result->set_request_id(fetch.request);
  result->set_attempt(fetch.attempt);
  result->set_source(fetch.source);
  result->set_seconds(seconds);
  if (refusal.ok()) {
    bytes_ += bytes;
    tokens_ += static_cast<uint64_t>(fetch.position);
    seconds_ += seconds;
    result->set_reason(name);
    result->set_tokens(static_cast<uint64_t>(fetch.position));
    result->set_bytes(bytes);
    result->set_transfer_seconds(transfer_seconds);
    LogInfo("fetch.complete", {{"request", fetch.request},
                               {"attempt", fetch.attempt},
                               {"source", fetch.source},
                               {"tokens", fetch.position},
                               {"bytes", bytes},
                               {"seconds", seconds}});
  } else {
    result->set_code(static_cast<int>(ReasonCode(refusal.reason)));
    result->set_reason(SafeMessage(absl::StrFormat("%s: %s", name, refusal.detail)));
    LogWarning("fetch.refused", {{"request", fetch.request},
                                 {"attempt", fetch.attempt},
                                 {"source", fetch.source},
                                 {"reason", name},
                                 {"detail", refusal.detail}});
  }
  links_->Send(fetch.link, std::move(message));
}

void FetchClient::AddMetrics(MetricList& list) const {
  const char* help = "States fetched from other workers, by result.";
  const auto ok = results_.find("OK");
  list.Counter("fetches_total", help, ok == results_.end() ? 0 : ok->second, {{"result", "OK"}});
  for (const auto& [name, count] : results_) {
    if (name != "OK") list.Counter("fetches_total", help, count, {{"result", name}});
  }
  list.Counter("fetch_bytes_total", "Payload of states that were fetched.", bytes_);
  list.Counter("fetch_tokens_total", "Tokens of prompts that were fetched, not computed.", tokens_);
  list.Counter("fetch_seconds_total", "From asking to the last byte, summed over fetched states.",
               seconds_);
  list.Gauge("requests", kHeldHelp, open(), {{"state", "fetching"}});
}

}  // namespace deltamesh
