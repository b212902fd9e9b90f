// What DecisionLog is told of a request, the one line of the log that says it all, and who else hears of it.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "runtime/base/log.h"
#include "services/router/router_core_impl.h"

namespace deltamesh {
namespace {

constexpr size_t kOfEachMax = 4;  // workers of a kind whose pairs are noted

void NoteRead(const Candidate& computes, DecisionCandidate& out) {
  const ColdState* read = computes.read();
  out.read_from = computes.read_from;
  out.read_bytes = read == nullptr ? 0 : read->bytes;
  out.read_seconds = computes.read_seconds;
}

void Describe(const Candidate& decode, const RequestShape& shape, DecisionCandidate& out) {
  out.prefill.clear();
  out.decode = decode.load->name;
  out.cached_tokens = decode.cached_tokens();
  out.compute_tokens = shape.compute_tokens - decode.cached_tokens();
  out.move_bytes = decode.holding.transfer_bytes;
  out.cost = decode.cost;
  out.fetch_from.clear();
  out.fetch_tokens = out.fetch_bytes = 0;
  out.fetch_seconds = 0;
  out.fetch_cold = false;
  NoteRead(decode, out);
  out.room = decode.room;
}

void AddPrefill(const Candidate& prefill, const RequestShape& shape, DecisionCandidate& out) {
  out.prefill = prefill.load->name;
  out.cached_tokens += prefill.cached_tokens();
  out.compute_tokens += shape.compute_tokens - prefill.cached_tokens();
  NoteRead(prefill, out);
  out.room = out.room && prefill.room;
}

void AddFetch(const FetchOffer& offer, const std::string& from, DecisionCandidate& out) {
  out.fetch_from = from;
  out.fetch_tokens = offer.tokens;
  out.fetch_bytes = offer.bytes;
  out.fetch_seconds = offer.seconds;
  out.fetch_cold = offer.cold;
}

// "prefill-0>decode-1 0.0312 decode-1 0.4" for people who grep: seconds, or tokens while nothing is measured.
std::string Others(const Decision& d) {
  std::string out;
  for (size_t i = 0; i < std::min(d.candidate_count, kOfEachMax); ++i) {
    const DecisionCandidate& c = d.candidates[i];
    absl::StrAppendFormat(&out, "%s%s%s%s%s%s %.4g%s%s", i == 0 ? "" : " ", c.fetch_from,
                          c.fetch_from.empty() ? "" : "=>", c.prefill, c.prefill.empty() ? "" : ">",
                          c.decode, c.cost.total(), d.measured ? "" : " tokens",
                          c.room ? "" : " (no room)");
  }
  return out;
}

void LogExplained(const Decision& d) {
  static const DecisionCandidate nobody;
  const DecisionCandidate& chosen = d.placements == 0 ? nobody : d.candidates[d.chosen];
  // An estimate is in seconds or there is none.
  const auto estimate = [&d](std::string_view key, double seconds) {
    return d.measured ? LogField(key, seconds) : LogField(key, "");
  };
  LogInfo("request.explained", {{"request", d.request_id},
                                {"trace_id", d.trace.trace_id},
                                {"span_id", d.trace.span_id},
                                {"parent_span_id", d.trace.parent_id},
                                {"status", absl::StatusCodeToString(d.code)},
                                {"prompt_tokens", d.prompt_tokens},
                                {"latent_tokens", d.latent_tokens},
                                {"snapshot_tokens", d.snapshot_tokens},
                                {"warm_tokens", d.warm_tokens},
                                {"object_store_tokens", d.object_tokens},
                                {"prefill", chosen.prefill},
                                {"decode", chosen.decode},
                                {"reason", DecisionReasonName(d.reason)},
                                {"measured", d.measured},
                                estimate("estimated_seconds", chosen.cost.total()),
                                estimate("queue_seconds", chosen.cost.queue),
                                estimate("move_seconds", chosen.cost.move),
                                {"move_bytes", chosen.move_bytes},
                                estimate("compute_seconds", chosen.cost.compute),
                                estimate("stall_seconds", chosen.cost.stall),
                                {"compute_tokens", chosen.compute_tokens},
                                {"read_from", ReadFromName(chosen.read_from)},
                                {"read_bytes", chosen.read_bytes},
                                estimate("read_seconds", chosen.read_seconds),
                                {"candidates", Others(d)},
                                {"waited_seconds", d.waited_seconds},
                                {"placements", d.placements},
                                {"handoffs_refused", d.handoffs_refused},
                                {"handoff_bytes", d.handoff_bytes},
                                {"handoff_seconds", d.handoff_seconds},
                                {"fetched_from", d.fetched_from},
                                {"fetched_tokens", d.fetched_tokens},
                                {"fetched_bytes", d.fetched_bytes},
                                {"fetch_seconds", d.fetch_seconds},
                                {"fetch_refusal", d.fetch_refusal},
                                {"fetches_unknown", d.fetches_open.size()},
                                {"restored_tokens", d.restored_tokens},
                                {"completion_tokens", d.completion_tokens},
                                {"ttft_seconds", d.ttft_seconds},
                                {"seconds", d.seconds}});
}

}  // namespace

void LogRefused(const RefusedRequest& refusal) {
  const std::string_view why(refusal.status.message().data(), refusal.status.message().size());
  LogInfo("request.refused", {{"request", refusal.request_id},
                              {"trace_id", refusal.trace.trace_id},
                              {"span_id", refusal.trace.span_id},
                              {"parent_span_id", refusal.trace.parent_id},
                              {"status", absl::StatusCodeToString(refusal.status.code())},
                              {"reason", why.substr(0, Decision::kMessageBytesMax)}});
}

void RouterCore::Impl::ExplainMatch(const RouterRequest& r, Decision& d) const {
  d.named = !r.keys.empty();
  d.latent_tokens = d.snapshot_tokens = d.warm_tokens = d.object_tokens = 0;
  d.snapshot_cold = false;
  for (const auto& [link, match] : r.held) {
    const Worker* worker = members.Find(link);
    if (worker == nullptr) continue;
    const int64_t block = BlockTokens();
    if (match.latents.value() * block > d.latent_tokens) {
      d.latent_tokens = match.latents.value() * block;
      d.latents_at = worker->load.name;
    }
    d.warm_tokens = std::max(d.warm_tokens, match.warm.value() * block);
    d.object_tokens = std::max(d.object_tokens, match.object.value() * block);
    const int64_t snapshot = match.snapshot.value() * block;
    const bool deeper = snapshot > d.snapshot_tokens;
    const bool nearer = snapshot == d.snapshot_tokens && d.snapshot_cold && !match.cold();
    if (deeper || nearer) {
      d.snapshot_tokens = snapshot;
      d.snapshot_cold = match.cold();
      d.snapshot_at = worker->load.name;
    }
  }
}

void RouterCore::Impl::Explain(const RouterRequest& r, const std::optional<Choice>& prefill,
                               const Choice& decode) {
  Decision* d = decisions.At(r.decision);
  if (d == nullptr) return;
  ++d->placements;
  d->waited_seconds += absl::ToDoubleSeconds(time - r.phase_since);
  ExplainMatch(r, *d);
  d->candidate_count = 0;
  const auto add_fetch = [this](const Candidate& c) {
    if (const FetchOffer* offer = c.offer()) {
      AddFetch(*offer, fetch_from_[offer->source].worker->load.name, scratch_);
    }
  };
  const size_t pairs = prefills_.candidates.size() * decodes_.candidates.size();
  // The chosen one is among them, whatever it costs by itself.
  const auto few_with = [](const Priced& priced, const Choice* chosen, size_t most) {
    std::vector<size_t> few = CheapestFew(priced.candidates, priced.shape, most);
    for (size_t i = 0; chosen != nullptr && i < priced.workers.size(); ++i) {
      const bool noted = std::find(few.begin(), few.end(), i) != few.end();
      if (priced.workers[i] == chosen->worker && !noted) few.back() = i;
    }
    return few;
  };
  const auto few = few_with(prefills_, prefill ? &*prefill : nullptr, kOfEachMax);
  for (const size_t j : few_with(decodes_, prefill ? &decode : nullptr, kOfEachMax)) {
    for (const size_t i : few) {
      Describe(decodes_.candidates[j], decodes_.shape, scratch_);
      AddPrefill(prefills_.candidates[i], prefills_.shape, scratch_);
      scratch_.cost = HandedOver(EndOf(prefills_, i), EndOf(decodes_, j));
      add_fetch(prefills_.candidates[i]);
      d->Add(scratch_);
    }
  }
  for (const size_t j : few_with(alone_, prefill ? nullptr : &decode, Decision::kCandidatesMax)) {
    Describe(alone_.candidates[j], alone_.shape, scratch_);
    scratch_.cost = Alone(alone_.candidates[j].cost);
    add_fetch(alone_.candidates[j]);
    d->Add(scratch_);
  }
  d->candidates_left_out =
      static_cast<int64_t>(pairs + alone_.candidates.size() - d->candidate_count);
  d->chosen = 0;
  int64_t with_room = 0;
  for (size_t i = 0; i < d->candidate_count; ++i) {
    const DecisionCandidate& c = d->candidates[i];
    with_room += c.room;
    const bool same =
        c.prefill.empty() ? !prefill : prefill && c.prefill == prefill->worker->load.name;
    if (same && c.decode == decode.worker->load.name) d->chosen = i;
  }
  d->measured = decode.cost.measured;
  d->reason =
      with_room + d->candidates_left_out > 1 ? DecisionReason::kCheapest : DecisionReason::kOnly;
}

void RouterCore::Impl::Conclude(const RouterRequest& r, const absl::Status& status) {
  Decision* d = decisions.At(r.decision);
  if (d == nullptr) return;
  d->restored_tokens = r.cached_tokens;
  d->completion_tokens = r.delivered;
  d->seconds = absl::ToDoubleSeconds(time - r.submitted);
  d->code = status.code();
  d->message = std::string(status.message()).substr(0, Decision::kMessageBytesMax);
  if (d->placements == 0) {
    d->reason = DecisionReason::kRefused;
    ExplainMatch(r, *d);
  }
  LogExplained(*d);
  if (concluded) concluded(*d);
}

void RouterCore::Impl::TurnAway(const RefusedRequest& refusal, absl::Time now) {
  const Decision& d = decisions.Refuse(refusal, now);
  LogRefused(refusal);
  if (concluded) concluded(d);
}

}  // namespace deltamesh
