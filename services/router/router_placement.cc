// Where requests go: the middle of RouterCore::Impl.
#include <algorithm>
#include <limits>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/prefix/prefix_hash.h"
#include "runtime/prefix/snapshot_plan.h"
#include "services/common/retry_hint.h"
#include "services/router/policy.h"
#include "services/router/router_core_impl.h"

namespace deltamesh {
namespace {

// Prefill workers that are tried for a pair beside the cheapest.
constexpr size_t kPrefillsTriedMax = 8;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Seconds of a transfer that pass while its sender computes. Its tokens hide none.
double HiddenBehind(const CostParts& prefill) { return prefill.measured ? prefill.compute : 0; }

}  // namespace

int64_t RouterCore::Impl::BlockTokens() const {
  const auto identity = members.identity();
  CHECK(identity && identity->block_tokens() > 0,
        "a worker is registered, so the identity is known");
  return identity->block_tokens();
}

RouterCore::Impl::Contexts RouterCore::Impl::DecodeContexts() const {
  Contexts best;
  for (const Worker* w : members.Alive(mesh::ROLE_DECODE)) {
    if (!members.CanCompute(*w)) continue;
    const int64_t pool =
        static_cast<int64_t>(w->registration.capacity().latent_blocks()) * BlockTokens();
    const int64_t context = std::min(w->load.context_tokens, pool);
    best.live = std::max(best.live, context);
    if (!w->load.draining) best.open = std::max(best.open, context);
  }
  return best;
}

absl::Status RouterCore::Impl::Ready() const {
  const std::vector<Worker*>& decode = members.Alive(mesh::ROLE_DECODE);
  if (decode.empty()) return Unavailable("no decode worker is connected; start one or wait for it");
  if (std::all_of(decode.begin(), decode.end(), [](const Worker* w) { return w->load.draining; })) {
    return Unavailable("all %d decode workers are draining; retry when others are up",
                       decode.size());
  }
  return members.ExpertsComplete();
}

RouterCore::Impl::Placed RouterCore::Impl::TryPlace(RouterRequest& r, const Placing& how,
                                                    absl::Time now) {
  if (const absl::Status ready = Ready(); !ready.ok()) {
    Fail(r, ready);
    return Placed::kEnded;
  }
  const Contexts contexts = DecodeContexts();
  if (r.fills_context) {  // less fits when whoever held most has left or drains
    const int64_t room = std::max(contexts.open - r.prompt_tokens(), r.delivered + 1);
    r.spec.max_tokens = std::min(r.spec.max_tokens, room);
  }
  const int64_t reach = r.prompt_tokens() + r.spec.max_tokens;
  if (reach > contexts.open) {
    Fail(r,
         reach > contexts.live
             ? Unavailable("no live decode worker can hold %d tokens; the one that could has left",
                           reach)
             : Unavailable("the only decode workers that can hold %d tokens are draining; retry "
                           "when another is up",
                           reach));
    return Placed::kEnded;
  }
  const int64_t block = BlockTokens();
  const int64_t position = (r.prompt_tokens() - 1) / block * block;
  LookUp(r, now);
  const MeanRates rates = RatesNow();
  bool prefill_capable = false;
  std::optional<Choice> prefill, decode;
  prefills_.Start({});
  decodes_.Start({});
  FindFetchSources(r);
  alone_.Start({});
  if (position > 0 && options.disaggregation != Disaggregation::kNever) {
    for (const Worker* w : members.Alive(mesh::ROLE_PREFILL)) {
      const mesh::Capacity& c = w->registration.capacity();
      prefill_capable |= members.CanCompute(*w) && !w->load.draining &&
                         w->load.context_tokens >= position &&
                         static_cast<int64_t>(c.latent_blocks()) * block >= position;
    }
    if (prefill_capable && how.prefill) {
      Pair pair = ChoosePair(r, position, rates);
      prefill = std::move(pair.prefill);
      decode = std::move(pair.decode);
    }
  }
  // A decode worker that has the session may compute what is new sooner than it could be brought there.
  // So may one that has not, where computing takes less than moving the state: once both are known.
  std::optional<Choice> alone;
  if (!prefill_capable || options.disaggregation == Disaggregation::kPlanned) {
    const bool anyone = !prefill_capable || (links.known() && rates.any > 0);
    alone = ChooseDecode(r, position, rates, {.anyone = anyone});
  }
  const bool with_prefill =
      decode &&
      (!alone || HandedOver(EndOf(*prefill), EndOf(*decode)).total() < Alone(alone->cost).total());
  if (!with_prefill) {
    // Rather wait for a prefill worker than load one that decodes with more than a step of prompt.
    if (!alone || (prefill_capable && !decode && !FitsAStep(*alone))) {
      const bool only_prefill =
          prefill_capable && !prefill &&
          (alone || ChooseDecode(r, position, rates, {.handoff = true}).has_value());
      return only_prefill ? Placed::kNoPrefill : Placed::kNoRoom;
    }
    decode = alone;
    prefill.reset();
  }
  Assign(r, prefill, *decode, now);
  return Placed::kYes;
}

void RouterCore::Impl::Assign(RouterRequest& r, const std::optional<Choice>& prefill,
                              const Choice& decode, absl::Time now) {
  waiting.Take(r.spec.request_id);
  if (now > r.phase_since) drain.Placed(r.cost);
  counters.waited_seconds += absl::ToDoubleSeconds(now - r.phase_since);
  Explain(r, prefill, decode);
  r.cost = 0;  // if it has to wait again, its tenant has paid for it
  r.fetch_from = decode.fetch_from;
  r.fetch_tokens = decode.fetch_tokens;
  if (prefill) AssignPrefill(r, *prefill);
  r.decode = decode.worker->link;
  r.decode_name = decode.worker->load.name;
  r.decode_blocks = decode.shape.blocks;
  r.decode_tokens = decode.to_compute();
  r.decode_named = Named(r, *decode.worker, static_cast<size_t>(r.prompt_tokens() / BlockTokens()));
  members.Charge(r.decode, DecodeRoom(r));
  const bool append = r.decode_tokens < r.prompt_tokens();
  ++(prefill                  ? counters.placed_prefill
     : decode.fetch_from != 0 ? counters.placed_fetch
     : append                 ? counters.placed_append
                              : counters.placed_alone);
  r.handoff_tokens = prefill ? prefill->shape.compute_tokens : 0;
  r.phase = prefill ? RequestPhase::kLanding : RequestPhase::kDecoding;
  r.phase_since = r.placed = now;
  r.estimated.reset();
  const double cost = (prefill ? prefill->cost.total() : 0) + decode.cost.total();
  if (decode.cost.measured) {
    r.estimated = decode.cost.total() - decode.cost.stall + (prefill ? prefill->cost.total() : 0);
  }
  (prefill ? staying : handing_over).Fade();
  r.cached_tokens = 0;
  r.attempt = std::exchange(next_attempt, next_attempt + kAttemptsPerPlacement);
  r.refused_attempt = 0;
  SendStartDecode(r);
  LogInfo("request.placed", {{"request", r.spec.request_id},
                             {"decode", r.decode_name},
                             {"prefill", prefill ? r.prefill_name : "none"},
                             {"fetch_tokens", r.fetch_tokens},
                             {"attempt", r.attempt},
                             {"prompt_tokens", r.prompt_tokens()},
                             {"to_compute", (prefill ? r.prefill_tokens : 0) + r.decode_tokens},
                             {decode.cost.measured ? "estimated_seconds" : "relative_cost", cost}});
}

void RouterCore::Impl::AssignPrefill(RouterRequest& r, const Choice& prefill) {
  r.prefill = prefill.worker->link;
  r.prefill_name = prefill.worker->load.name;
  r.prefill_blocks = prefill.shape.blocks;
  r.prefill_tokens = prefill.to_compute();
  r.fetch_from = prefill.fetch_from;
  r.fetch_tokens = prefill.fetch_tokens;
  r.prefill_named = Named(r, *prefill.worker, static_cast<size_t>(r.prefill_blocks));
  members.Charge(r.prefill, PrefillRoom(r));
}

IndexMatch RouterCore::Impl::HeldBy(const RouterRequest& r, LinkId link) {
  const auto found = r.held.find(link);
  return found == r.held.end() ? IndexMatch() : found->second;
}

std::span<const uint64_t> RouterCore::Impl::Restored(const RouterRequest& r, LinkId link) {
  const auto warm = static_cast<size_t>(HeldBy(r, link).warm.value());
  return std::span(r.keys).first(std::min(warm, r.keys.size()));
}

size_t RouterCore::Impl::Named(const RouterRequest& r, const Worker& worker, size_t most) {
  const std::span keys = std::span(r.keys).first(std::min(most, r.keys.size()));
  return Membership::Named(worker, keys, Restored(r, worker.link).size());
}

bool RouterCore::Impl::FitsAStep(const Choice& choice) const {
  const mesh::Capacity& c = choice.worker->registration.capacity();
  return choice.to_compute() <= static_cast<int64_t>(c.step_tokens());
}

void RouterCore::Impl::NamePrefixes(RouterRequest& r) const {
  if (prefixes.empty() || r.spec.cache.off() || !r.keys.empty()) return;
  if (!r.spec.prefix_keys.empty()) {
    r.keys = r.spec.prefix_keys;
    return;
  }
  const auto identity = members.identity();
  if (!identity) return;
  PrefixChain chain(PrefixModel(identity->digest(), identity->state_layout()), r.spec.cache.salt());
  chain.Append(std::span(r.spec.prompt).first(r.spec.prompt.size() - 1));
  r.keys.reserve(chain.keys().size());
  for (const PrefixKey& key : chain.keys()) r.keys.push_back(key.index());
}

// Who comes back is known by its session or by the key that its client gave, else by how its prompt begins.
void RouterCore::Impl::SetAffinity(RouterRequest& r) {
  if (r.spec.cache.session() != 0) {
    r.affinity = absl::StrFormat("session %016x", r.spec.cache.session());
  } else if (!r.keys.empty()) {
    r.affinity = absl::StrFormat("prefix %016x", r.keys.front());
  } else {
    r.affinity = r.spec.request_id;
  }
}

void RouterCore::Impl::LookUp(RouterRequest& r, absl::Time now) {
  NamePrefixes(r);
  if (r.affinity.empty() || r.keys_named != r.keys.size()) {
    r.keys_named = r.keys.size();
    SetAffinity(r);
  }
  if (r.looked_up_version == prefixes.version()) return;
  r.looked_up_version = prefixes.version();
  r.looked_up = now;
  r.held.clear();
  if (r.keys.empty()) return;
  r.held = prefixes.Find(r.keys);
  ++counters.prefix_lookups;
}

uint64_t RouterCore::Impl::JunctionOf(const RouterRequest& r) const {
  LatentBlocks latents;
  SnapshotBlocks snapshot;
  for (const auto& [link, match] : r.held) {
    latents = std::max(latents, match.latents);
    snapshot = std::max(snapshot, match.reachable());
  }
  const bool parts = latents.value() < static_cast<int64_t>(r.keys.size());
  const int64_t saved = latents.value() - snapshot.value();
  if (!parts || saved < kJunctionBlocksMin) return 0;
  return static_cast<uint64_t>(latents.value() * BlockTokens());
}

double RouterCore::Impl::HandOverSeconds(const End& prefill, const Worker& to,
                                         const Holding& holding) const {
  const double rate = links.Between(prefill.worker.link, ReceiverOf(to));
  const double hideable = static_cast<double>(holding.hideable_bytes) / rate;
  return static_cast<double>(holding.transfer_bytes) / rate -
         std::min(hideable, HiddenBehind(prefill.cost));
}

CostParts RouterCore::Impl::HandedOver(const End& prefill, const End& decode) const {
  const CostParts &first = prefill.cost, &second = decode.cost;
  CostParts parts = {.queue = first.queue + second.queue,
                     .move = first.move + HandOverSeconds(prefill, decode.worker, decode.holding),
                     .compute = first.compute + second.compute,
                     .stall = second.stall,
                     .measured = first.measured && second.measured};
  if (options.shared_processors) {
    const WorkerLoad& to = decode.worker.load;
    const double first_token = parts.total() - parts.stall;
    const double weight = parts.measured ? StallWeight(to, decodes_.shape, first_token)
                                         : static_cast<double>(to.resident > 0);
    parts.stall += first.compute * weight;
  }
  parts.move += handing_over.Or(staying);
  return parts;
}

CostParts RouterCore::Impl::Alone(CostParts decode) const {
  decode.move += staying.Or(handing_over);
  return decode;
}

MeanRates RouterCore::Impl::RatesNow() const {
  double prompts = 0, any = 0;
  int64_t prompts_known = 0, any_known = 0;
  for (const mesh::Role role : {mesh::ROLE_PREFILL, mesh::ROLE_DECODE}) {
    for (const Worker* w : members.Alive(role)) {
      const double of_prompts = w->load.prompt_tokens_per_second, mixed = w->load.tokens_per_second;
      // Prefill workers compute nothing else, if in small steps.
      const double rate = of_prompts > 0 || role == mesh::ROLE_DECODE ? of_prompts : mixed;
      prompts += rate;
      prompts_known += rate > 0;
      any += mixed;
      any_known += mixed > 0;
    }
  }
  MeanRates rates;
  if (any_known > 0) rates.any = any / static_cast<double>(any_known);
  if (prompts_known > 0) rates.any = rates.prompts = prompts / static_cast<double>(prompts_known);
  return rates;
}

std::optional<RouterCore::Impl::Choice> RouterCore::Impl::Choose(Priced& priced,
                                                                 const MeanRates& rates) {
  Price(priced.candidates, priced.shape, rates);
  const std::optional<size_t> best = Cheapest(priced.candidates, priced.shape);
  if (!best) return std::nullopt;
  return ChoiceOf(priced, *best);
}

RouterCore::Impl::Choice RouterCore::Impl::ChoiceOf(const Priced& priced, size_t candidate) const {
  const Candidate& c = priced.candidates[candidate];
  const FetchOffer* const offer = c.offer();
  return {.worker = priced.workers[candidate],
          .shape = priced.shape,
          .holding = c.holding,
          .cost = c.cost,
          .cached_tokens = c.cached_tokens(),
          .fetch_from = offer == nullptr ? 0 : fetch_from_[offer->source].worker->link,
          .fetch_tokens = offer == nullptr ? 0 : offer->tokens};
}

Holding RouterCore::Impl::Cached(const Worker& worker, const IndexMatch& match,
                                 int64_t most) const {
  const int64_t block = BlockTokens();
  Holding holding;
  holding.cached_tokens = std::min(match.warm.value() * block, most);
  const auto below = [&](SnapshotBlocks snapshot) {
    return ColdState{.tokens = std::min(snapshot.value() * block, most),
                     .bytes = ReadBytes(worker, match, snapshot)};
  };
  if (match.cold()) holding.disk = below(match.snapshot);
  if (match.object > match.warm) holding.objects = below(match.object);
  return holding;
}

namespace {

// A decode worker that holds nothing of a prompt computes it alone, beside prefill workers, only when it can
// read most of it from its object store, or fetch most of it. False: it cannot.
bool KeepAppends(const WorkerLoad& worker, int64_t prompt_tokens, Holding& holding) {
  const bool reads = ReadOf(worker, holding).from == ReadFrom::kObjects;
  if (reads && holding.objects.tokens * 2 >= prompt_tokens) return true;
  size_t kept = 0;
  for (size_t i = 0; i < holding.fetch_count; ++i) {
    const FetchOffer& offer = holding.fetches[i];
    if (offer.tokens * 2 >= prompt_tokens) holding.fetches[kept++] = offer;
  }
  holding.fetch_count = kept;
  holding.must_fetch = true;
  return kept > 0;
}

}  // namespace

// Latents are on their way while the rest of the prompt computes. So where moving them takes longer, who
// prefills at the least cost alone need not be of the cheapest pair: who computes for longer hides more, and
// who has the better link moves sooner.
RouterCore::Impl::Pair RouterCore::Impl::ChoosePair(const RouterRequest& r, int64_t position,
                                                    const MeanRates& rates) {
  Pair best;
  best.prefill = ChoosePrefill(r, position, rates);
  if (!best.prefill) return best;
  const auto decode_after = [&](const Choice& prefill) {
    return ChooseDecode(r, position, rates, {.handoff = true, .after = &prefill});
  };
  best.decode = decode_after(*best.prefill);
  if (!best.decode || !best.prefill->cost.measured) return best;
  const auto total = [&](const Choice& from, const Choice& to) {
    return HandedOver(EndOf(from), EndOf(to)).total();
  };
  const Choice first = *best.prefill;
  const double least = LeastAfterPrefill();
  double cheapest = total(first, *best.decode);
  Worker* decoded_after = first.worker;
  for (const size_t i : CheapestFew(prefills_.candidates, prefills_.shape, kPrefillsTriedMax)) {
    const Candidate& c = prefills_.candidates[i];
    if (!c.room || c.cost.total() + least >= cheapest) break;
    if (prefills_.workers[i] == first.worker) continue;
    if (!links.differ() && HiddenBehind(c.cost) <= HiddenBehind(first.cost)) continue;
    const Choice prefill = ChoiceOf(prefills_, i);
    const std::optional<Choice> decode = decode_after(prefill);
    decoded_after = prefill.worker;
    if (!decode || total(prefill, *decode) >= cheapest) continue;
    cheapest = total(prefill, *decode);
    best = {.prefill = prefill, .decode = decode};
  }
  // What is told of the decision is as of the pair that was chosen.
  if (decoded_after != best.prefill->worker) best.decode = decode_after(*best.prefill);
  return best;
}

// What any pair costs beside its prefill, were nothing to move.
double RouterCore::Impl::LeastAfterPrefill() const {
  double least = std::numeric_limits<double>::infinity();
  for (const Candidate& c : decodes_.candidates) {
    if (c.room) least = std::min(least, c.cost.total() - c.holding.transfer_seconds);
  }
  return least + handing_over.Or(staying);
}

std::optional<RouterCore::Impl::Choice> RouterCore::Impl::ChoosePrefill(const RouterRequest& r,
                                                                        int64_t position,
                                                                        const MeanRates& rates) {
  const int64_t block = BlockTokens();
  // The worker that failed last is taken only when no other has room.
  for (const bool avoid : {true, false}) {
    prefills_.Start({.affinity = r.affinity,
                     .compute_tokens = position,
                     .blocks = position / block,
                     .context_tokens = position});
    for (Worker* w : members.Alive(mesh::ROLE_PREFILL)) {
      if (avoid && w->load.name == r.avoid_prefill) continue;
      if (!members.CanCompute(*w)) continue;
      const IndexMatch match = HeldBy(r, w->link);
      Holding holding = Cached(*w, match, position);
      AddFetches(*w, match, holding);
      holding.shared_blocks = Membership::Shared(*w, Restored(r, w->link));
      prefills_.Add(w, holding);
    }
    if (auto chosen = Choose(prefills_, rates)) return chosen;
    if (r.avoid_prefill.empty()) break;
  }
  return std::nullopt;
}

Holding RouterCore::Impl::Lacking(const Worker& worker, const IndexMatch& match,
                                  int64_t position) const {
  const mesh::Capacity& c = worker.registration.capacity();
  const int64_t blocks = position / BlockTokens() - WarmLatents(worker, match).value();
  Holding holding;
  holding.hideable_bytes = std::max<int64_t>(blocks, 0) * static_cast<int64_t>(c.block_bytes());
  holding.transfer_bytes = static_cast<int64_t>(c.slab_bytes()) + holding.hideable_bytes;
  return holding;
}

std::optional<RouterCore::Impl::Choice> RouterCore::Impl::ChoosePrefillFor(const RouterRequest& r,
                                                                           const Worker& decode) {
  std::optional<Choice> best = ChoosePrefill(r, r.handoff_tokens, RatesNow());
  if (!best || !best->cost.measured) return best;
  const Holding lacking = Lacking(decode, HeldBy(r, decode.link), r.handoff_tokens);
  const auto total = [&](const Choice& prefill) {
    return prefill.cost.total() + HandOverSeconds(EndOf(prefill), decode, lacking);
  };
  for (const size_t i : CheapestFew(prefills_.candidates, prefills_.shape, kPrefillsTriedMax)) {
    if (!prefills_.candidates[i].room) break;
    Choice other = ChoiceOf(prefills_, i);
    if (total(other) < total(*best)) best = std::move(other);
  }
  return best;
}

std::optional<RouterCore::Impl::Choice> RouterCore::Impl::ChooseDecode(const RouterRequest& r,
                                                                       int64_t position,
                                                                       const MeanRates& rates,
                                                                       const DecodeWay& way) {
  const int64_t block = BlockTokens(), reach = r.prompt_tokens() + r.spec.max_tokens;
  Priced& priced = way.handoff ? decodes_ : alone_;
  priced.Start({.affinity = r.affinity,
                .compute_tokens = way.handoff ? r.prompt_tokens() - position : r.prompt_tokens(),
                .blocks = CeilDiv(reach, block),
                .context_tokens = reach,
                .beside_answers = true,
                .answer_seconds = answer_seconds.value(),
                .first_token_seconds = first_token_seconds.value()});
  for (Worker* w : members.Alive(mesh::ROLE_DECODE)) {
    if (!members.CanCompute(*w)) continue;
    const IndexMatch match = HeldBy(r, w->link);
    Holding holding;
    if (way.handoff) {
      holding = Lacking(*w, match, position);
      if (way.after) holding.transfer_seconds = HandOverSeconds(EndOf(*way.after), *w, holding);
    } else {
      holding = Cached(*w, match, position);
      AddFetches(*w, match, holding);
      if (!way.anyone && match.snapshot.value() == 0 &&
          !KeepAppends(w->load, r.prompt_tokens(), holding))
        continue;
    }
    holding.shared_blocks = Membership::Shared(*w, Restored(r, w->link));
    priced.Add(w, holding);
  }
  return Choose(priced, rates);
}

void RouterCore::Impl::SendStartDecode(const RouterRequest& r) {
  mesh::RouterMessage message;
  mesh::StartDecode* start = message.mutable_start_decode();
  start->set_request_id(r.spec.request_id);
  start->mutable_prompt()->Assign(r.spec.prompt.begin(), r.spec.prompt.end());
  *start->mutable_sampling() = r.spec.sampling;
  start->set_max_tokens(static_cast<uint32_t>(r.spec.max_tokens));
  start->mutable_stop_token_ids()->Assign(r.spec.stop_token_ids.begin(),
                                          r.spec.stop_token_ids.end());
  start->set_handoff_tokens(static_cast<uint64_t>(r.handoff_tokens));
  start->set_attempt(r.attempt);
  start->set_deadline_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(r.deadline)));
  *start->mutable_cache() = r.spec.cache;
  if (r.handoff_tokens == 0) {
    start->mutable_cache()->set_junction(JunctionOf(r));
    if (auto source = FetchSourceOf(r)) {
      *start->mutable_fetch() = *std::move(source);
      AwaitFetch(r, r.decode);
    }
  }
  actions.push_back(SendToWorker{r.decode, std::move(message)});
}

void RouterCore::Impl::SendStartPrefill(RouterRequest& r, const mesh::Landing& landing,
                                        absl::Time now) {
  mesh::RouterMessage message;
  mesh::StartPrefill* start = message.mutable_start_prefill();
  start->set_request_id(r.spec.request_id);
  start->mutable_tokens()->Assign(r.spec.prompt.begin(), r.spec.prompt.begin() + r.handoff_tokens);
  *start->mutable_landing() = landing;
  start->set_attempt(r.attempt);
  start->set_deadline_unix_ns(static_cast<uint64_t>(absl::ToUnixNanos(r.deadline)));
  *start->mutable_cache() = r.spec.cache;
  start->mutable_cache()->set_junction(JunctionOf(r));
  if (auto source = FetchSourceOf(r)) {
    *start->mutable_fetch() = *std::move(source);
    AwaitFetch(r, r.prefill);
  }
  actions.push_back(SendToWorker{r.prefill, std::move(message)});
  r.sender = r.prefill;
  r.phase = RequestPhase::kHandoff;
  r.phase_since = now;
}

void RouterCore::Impl::SendCancel(LinkId link, const RequestId& id) {
  if (members.Find(link) == nullptr) return;
  mesh::RouterMessage message;
  message.mutable_cancel()->set_request_id(id);
  actions.push_back(SendToWorker{link, std::move(message)});
}

void RouterCore::Impl::Requeue(RouterRequest& r, absl::Time now) {
  SendCancel(r.decode, r.spec.request_id);
  SendCancel(r.prefill, r.spec.request_id);
  ReleaseDecode(r);
  ReleasePrefill(r);
  r.phase = RequestPhase::kWaiting;
  r.phase_since = r.waiting_since = now;
  r.prefill_gave_up.reset();
  Enqueue(r);  // before those that came after it
}

void RouterCore::Impl::FailWaiting(RouterRequest& r) {
  Fail(r, WithRetryAfter(ResourceExhausted("waited %s for a worker with room; retry later",
                                           absl::FormatDuration(options.waiting_max)),
                         RetryAfter(waiting.tokens())));
}

void RouterCore::Impl::WaitForRoom(RouterRequest& r, LinkId full, absl::Time now) {
  ++counters.placement_refusals;
  const absl::Time since = r.waiting_since;
  // Here too: a tick may find the request with a worker each time, and the wait would not end.
  if (now - since > options.waiting_max) {
    FailWaiting(r);
    return members.MarkFull(full);
  }
  Requeue(r, now);
  r.waiting_since = since;
  members.MarkFull(full);  // last: giving the room back must not undo it
}

bool RouterCore::Impl::CountHandoffFailure(RouterRequest& r, const absl::Status& why) {
  ++r.handoff_failures;
  r.avoid_prefill = r.prefill_name;
  LogWarning("handoff.failed", {{"request", r.spec.request_id},
                                {"attempt", r.attempt},
                                {"prefill", r.avoid_prefill},
                                {"decode", r.decode_name},
                                {"reason", MessageOf(why)}});
  if (r.handoff_failures < options.handoff_attempts_max) {
    ++counters.prefill_retries;
    return true;
  }
  const std::string message =
      absl::StrFormat("the prompt's state could not be handed over in %d tries: %s",
                      r.handoff_failures, MessageOf(why));
  Fail(r, absl::IsDataLoss(why) ? absl::DataLossError(message) : absl::UnavailableError(message));
  return false;
}

}  // namespace deltamesh
