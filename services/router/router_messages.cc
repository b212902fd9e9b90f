#include <algorithm>
#include <cmath>
#include <utility>

#include "deltamesh/mesh/handoff.pb.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "services/router/output_check.h"
#include "services/router/router_core_impl.h"

namespace deltamesh {
namespace {

// The part of a reason before its details, if it is one we know: label values stay a small set.
template <typename Result>
std::string ReasonName(const Result& result) {
  if (result.code() == 0) return "OK";
  const std::string name = result.reason().substr(0, result.reason().find_first_of(" :,;"));
  mesh::RefusalReason parsed;
  return mesh::RefusalReason_Parse(name, &parsed) ? name : "OTHER";
}

constexpr uint64_t kLeastTimedBytes = 1 << 20;
constexpr size_t kNameBytesMax = 256;  // of what others say, in explanations

absl::StatusCode CodeOf(int32_t code) {
  const bool known = code > 0 && code <= static_cast<int32_t>(absl::StatusCode::kUnauthenticated);
  return known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kInternal;
}

}  // namespace

void RouterCore::Impl::CountReason(const std::string& name, Results& results) {
  for (auto& [known, count] : results) {
    if (known == name) {
      ++count;
      return;
    }
  }
  results.emplace_back(name, 1);
}

void RouterCore::Impl::OnMessage(LinkId link, const mesh::WorkerMessage& message, absl::Time now) {
  time = now;
  if (!members.Touch(link, now)) {
    ++counters.stale_messages;
    return;
  }
  if (message.has_register_()) return OnRegister(link, message.register_(), now);
  const Worker* found = members.Find(link);
  if (found == nullptr) {
    ++counters.malformed_messages;
    members.Refuse(link, FailedPrecondition("the first message of a link must be Register"));
    return;
  }
  const Worker& from = *found;
  const mesh::Role role = from.registration.role();
  const bool decode = role == mesh::ROLE_DECODE;
  const bool prefill = role == mesh::ROLE_PREFILL;
  switch (message.body_case()) {
    case mesh::WorkerMessage::kHeartbeat:
      members.OnHeartbeat(link, message.heartbeat());
      return PlaceWaiting(now);
    case mesh::WorkerMessage::kLandingGranted:
      if (decode) return OnLanding(from, message.landing_granted(), now);
      break;
    case mesh::WorkerMessage::kHandoffResult:
      if (decode) return OnHandoffResult(from, message.handoff_result(), now);
      break;
    case mesh::WorkerMessage::kPrefillFinished:
      if (prefill) return OnPrefillFinished(from, message.prefill_finished());
      break;
    case mesh::WorkerMessage::kOutputs:
      if (!decode) break;
      for (const mesh::SequenceOutput& output : message.outputs().sequences()) {
        OnOutput(from, output, now);
      }
      return PlaceWaiting(now);
    case mesh::WorkerMessage::kFetchResult:
      if (decode || prefill) return OnFetchResult(from, message.fetch_result());
      break;
    case mesh::WorkerMessage::kConnection:
      if (decode || prefill) return OnConnection(from, message.connection());
      break;
    case mesh::WorkerMessage::kPrefixes:
      if (decode || prefill) return OnPrefixes(from, message.prefixes());
      break;
    case mesh::WorkerMessage::kSession:
      if (decode || prefill) return sessions.OnReply(link, message.session(), now);
      break;
    case mesh::WorkerMessage::kFailed:
      if (decode || prefill) return OnRequestFailed(from, message.failed(), now);
      break;
    default:
      break;
  }
  // A peer of the same protocol version never does this: its next messages cannot be trusted
  // either.
  ++counters.malformed_messages;
  const absl::Status breach =
      FailedPrecondition("worker \"%s\" sent message kind %d, which its role does not send",
                         from.load.name, static_cast<int>(message.body_case()));
  if (const auto lost = members.Refuse(link, breach)) LoseWorker(*lost, breach, now);
}

void RouterCore::Impl::AskPrefixes(LinkId link) {
  mesh::RouterMessage message;
  message.mutable_resync_prefixes();
  actions.push_back(SendToWorker{link, std::move(message)});
  ++counters.prefix_resyncs;
}

void RouterCore::Impl::OnPrefixes(const Worker& from, const mesh::PrefixChanges& message) {
  switch (prefixes.OnChanges(from.link, message)) {
    case PrefixFeed::Heard::kTaken:
      break;
    case PrefixFeed::Heard::kResync:
      return AskPrefixes(from.link);
    case PrefixFeed::Heard::kIgnored:
      ++counters.stale_messages;
      break;
    case PrefixFeed::Heard::kMalformed:
      ++counters.malformed_messages;
      return AskPrefixes(from.link);
  }
}

void RouterCore::Impl::OnRegister(LinkId link, const mesh::Register& message, absl::Time now) {
  if (const auto lost = members.OnRegister(link, message, now)) {
    LoseWorker(*lost, Unavailable("it registered again with epoch %d", message.epoch()), now);
  }
  if (members.Find(link) != nullptr) sessions.OnJoined(message);
  PlaceWaiting(now);
}

void RouterCore::Impl::OnLanding(const Worker& from, const mesh::LandingGranted& message,
                                 absl::Time now) {
  RouterRequest* r = Find(message.request_id());
  const bool current = r != nullptr && r->decode == from.link &&
                       r->phase == RequestPhase::kLanding && message.attempt() == r->attempt;
  if (!current) {
    ++counters.stale_messages;
    return;
  }
  if (static_cast<int64_t>(message.landing().position()) != r->handoff_tokens) {
    ++counters.malformed_messages;
    return Fail(*r,
                Internal("decode worker \"%s\" granted a landing at %d tokens, %d were asked for",
                         from.load.name, message.landing().position(), r->handoff_tokens));
  }
  if (r->prefill == 0) {
    LookUp(*r, now);
    FindFetchSources(*r);
    const std::optional<Choice> other = ChoosePrefillFor(*r, from);
    if (!other) {
      // The planned worker is gone and no other has room: plan the whole placement anew.
      Requeue(*r, now);
      return PlaceWaiting(now);
    }
    AssignPrefill(*r, *other);
  }
  SendStartPrefill(*r, message.landing(), now);
}

// Little says nothing.
void RouterCore::Impl::LearnBandwidth(LinkId from, const Worker& to, uint64_t bytes,
                                      double seconds) {
  if (bytes < kLeastTimedBytes || !(seconds > 0)) return;
  links.Moved(from, ReceiverOf(to), static_cast<double>(bytes) / seconds);
}

void RouterCore::Impl::OnConnection(const Worker& from, const mesh::ConnectionMeasured& message) {
  if (message.to().empty() || message.to().size() > kNameBytesMax) {
    ++counters.malformed_messages;
    return;
  }
  links.Measured(from.link, {message.to(), message.to_epoch()}, message.bytes_per_second());
}

void RouterCore::Impl::CountFetch(const Worker& by, const mesh::FetchResult& message) {
  const bool ok = message.code() == 0;
  const std::string reason = ReasonName(message);
  CountReason(reason, counters.fetch_results);
  if (fetches_seen.size() < kFetchesSeenMax && std::isfinite(message.seconds())) {
    fetches_seen.push_back({.reason = reason,
                            .seconds = std::max(0.0, message.seconds()),
                            .bytes = ok ? message.bytes() : 0});
  }
  if (!ok) return;
  counters.fetched_tokens += message.tokens();
  counters.fetched_bytes += message.bytes();
  const Worker* source = members.FindByName(message.source());
  LearnBandwidth(source == nullptr ? 0 : source->link, by, message.bytes(),
                 message.transfer_seconds());
}

// It may be late: the workers' links are many, and the request goes on, or ends, by what others say.
Decision* RouterCore::Impl::DecisionOf(const RouterRequest* r, const RequestId& id,
                                       const Decision::OpenFetch& fetch) {
  return r != nullptr ? decisions.At(r->decision) : decisions.Awaiting(id, fetch);
}

void RouterCore::Impl::OnFetchResult(const Worker& from, const mesh::FetchResult& message) {
  if (!message.not_needed()) CountFetch(from, message);
  RouterRequest* r = Find(message.request_id());
  const bool current = r != nullptr && (r->decode == from.link || r->sender == from.link) &&
                       message.attempt() == r->attempt;
  if (current && r->phase != RequestPhase::kWaiting) r->phase_since = time;
  const Decision::OpenFetch fetch = {from.link, message.attempt()};
  Decision* d = DecisionOf(r, message.request_id(), fetch);
  if (d == nullptr || std::erase(d->fetches_open, fetch) == 0) {
    if (!current) ++counters.stale_messages;
    return;
  }
  if (message.not_needed()) return;
  const bool ok = message.code() == 0;
  d->fetched_from = SafeMessage(message.source(), kNameBytesMax);
  d->fetch_seconds += std::isfinite(message.seconds()) ? message.seconds() : 0;
  d->fetch_refusal = ok ? "" : SafeMessage(message.reason(), kNameBytesMax);
  if (!ok) return;
  d->fetched_tokens = static_cast<int64_t>(
      std::min<uint64_t>(message.tokens(), static_cast<uint64_t>(d->prompt_tokens)));
  d->fetched_bytes += static_cast<int64_t>(message.bytes());
}

void RouterCore::Impl::OnHandoffResult(const Worker& from, const mesh::HandoffResult& message,
                                       absl::Time now) {
  CountReason(ReasonName(message), counters.handoff_results);
  RouterRequest* r = Find(message.request_id());
  const bool current = r != nullptr && r->decode == from.link &&
                       r->phase == RequestPhase::kHandoff && message.attempt() == r->attempt;
  if (!current) {
    ++counters.stale_messages;
    return;
  }
  r->prefill_gave_up.reset();
  if (message.code() == 0) {
    ++counters.handoffs_ok;
    counters.handoff_bytes += message.bytes();
    counters.handoff_seconds += message.seconds();
    if (Decision* d = decisions.At(r->decision)) {
      d->handoff_bytes += static_cast<int64_t>(message.bytes());
      d->handoff_seconds += message.seconds();
    }
    LearnBandwidth(r->sender, from, message.bytes(), message.seconds());
    r->phase = RequestPhase::kDecoding;
    r->phase_since = now;
    return;
  }
  ++counters.handoffs_refused;
  if (Decision* d = decisions.At(r->decision)) ++d->handoffs_refused;
  if (!CountHandoffFailure(*r, absl::Status(CodeOf(message.code()), message.reason()))) {
    return PlaceWaiting(now);
  }
  SendCancel(r->prefill, r->spec.request_id);
  ReleasePrefill(*r);
  r->refused_attempt = r->attempt++;
  r->phase = RequestPhase::kLanding;
  r->phase_since = now;
}

void RouterCore::Impl::OnPrefillFinished(const Worker& from, const mesh::PrefillFinished& message) {
  RouterRequest* r = Find(message.request_id());
  if (r == nullptr || r->sender != from.link || message.attempt() != r->attempt) {
    ++counters.stale_messages;
    return;
  }
  // The worker's room is free again; until the verdict it stays known as the sender.
  if (r->phase == RequestPhase::kDecoding) ReleasePrefill(*r);
}

void RouterCore::Impl::LearnFirstToken(const RouterRequest& r, absl::Time now) {
  if (r.handoff_failures > 0) return;  // most of it went into tries that were refused
  const double seconds = absl::ToDoubleSeconds(now - r.placed);
  first_token_seconds.Seen(seconds);
  if (r.estimated) (r.handoff_tokens > 0 ? handing_over : staying).Seen(seconds - *r.estimated);
}

void RouterCore::Impl::OnOutput(const Worker& from, const mesh::SequenceOutput& output,
                                absl::Time now) {
  RouterRequest* r = Find(output.request_id());
  if (r == nullptr || r->decode != from.link || r->phase != RequestPhase::kDecoding ||
      output.attempt() != r->attempt) {
    ++counters.stale_messages;
    return;
  }
  const absl::Status valid = CheckOutput(output, {.delivered = r->delivered,
                                                  .max_tokens = r->spec.max_tokens,
                                                  .vocab = options.vocab,
                                                  .logprobs = r->spec.sampling.logprobs()});
  if (!valid.ok()) {
    ++counters.malformed_messages;
    return Fail(*r, Annotate(valid, absl::StrFormat("decode worker \"%s\" sent", from.load.name)));
  }
  const int64_t first = static_cast<int64_t>(output.first_index());
  const int64_t count = output.tokens_size();
  const int64_t known = std::min(r->delivered - first, count);  // delivered before: sent twice
  if (known > 0) ++counters.stale_messages;
  r->phase_since = now;
  if (r->prefill != 0) ReleasePrefill(*r);
  if (count > known) {
    r->cached_tokens = static_cast<int64_t>(
        std::min<uint64_t>(output.cached_tokens(), static_cast<uint64_t>(r->prompt_tokens())));
    ClientTokens tokens{r->spec.request_id, output, r->cached_tokens, r->overtaken};
    tokens.output.set_first_index(static_cast<uint64_t>(r->delivered));
    tokens.output.mutable_tokens()->erase(tokens.output.tokens().begin(),
                                          tokens.output.tokens().begin() + known);
    if (output.scores_size() > 0) {
      tokens.output.mutable_scores()->DeleteSubrange(0, static_cast<int>(known));
    }
    Decision* d = r->delivered == 0 ? decisions.At(r->decision) : nullptr;
    if (d != nullptr) d->ttft_seconds = absl::ToDoubleSeconds(now - r->submitted);
    if (r->delivered == 0) LearnFirstToken(*r, now);
    r->delivered += count - known;
    if (!r->spec.session.empty()) {
      r->said.insert(r->said.end(), tokens.output.tokens().begin(), tokens.output.tokens().end());
    }
    actions.push_back(std::move(tokens));
  }
  if (output.end() != mesh::SequenceOutput::RUNNING) Finish(*r, output.end(), now);
}

void RouterCore::Impl::OnRequestFailed(const Worker& from, const mesh::RequestFailed& message,
                                       absl::Time now) {
  RouterRequest* r = Find(message.request_id());
  // What came of a fetch is told before: nobody was asked.
  const Decision::OpenFetch fetch = {from.link, message.attempt()};
  if (Decision* d = DecisionOf(r, message.request_id(), fetch)) std::erase(d->fetches_open, fetch);
  bool ours = r != nullptr && (r->decode == from.link || r->prefill == from.link) &&
              message.attempt() == r->attempt;
  // In place of the grant that would follow a refused hand-off: the decode worker gave the request
  // up, under the attempt that was refused.
  ours |= r != nullptr && r->decode == from.link && r->phase == RequestPhase::kLanding &&
          r->refused_attempt != 0 && message.attempt() == r->refused_attempt;
  if (!ours) {
    ++counters.stale_messages;
    return;
  }
  const absl::Status why(CodeOf(message.code()), message.message());
  if (r->prefill == from.link) {
    OnPrefillGaveUp(*r, why, now);
    return PlaceWaiting(now);
  }
  if (absl::IsAborted(why) && r->phase == RequestPhase::kDecoding && r->handoff_tokens == 0 &&
      r->fetch_from != 0 && r->delivered == 0) {
    OnFetchGaveUp(*r, now);
    return PlaceWaiting(now);
  }
  if (!absl::IsResourceExhausted(why) || r->delivered > 0) {
    Fail(*r, Annotate(why, absl::StrFormat("decode worker \"%s\"", from.load.name)));
    return PlaceWaiting(now);
  }
  WaitForRoom(*r, from.link, now);  // another router was faster
  PlaceWaiting(now);
}

void RouterCore::Impl::OnPrefillGaveUp(RouterRequest& r, const absl::Status& why, absl::Time now) {
  if (r.phase != RequestPhase::kHandoff) {
    ++counters.stale_messages;
    return;
  }
  if (!absl::IsResourceExhausted(why)) {
    r.prefill_gave_up = now;
    r.prefill_status = why;
    return;
  }
  WaitForRoom(r, r.prefill, now);
}

}  // namespace deltamesh
