#include "services/worker/prefix_keeper.h"

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

namespace {

constexpr absl::Duration kCountEvery = absl::Milliseconds(100);

}  // namespace

PrefixKeeper::PrefixKeeper(PrefixCache* cache, StateTier* tier, const mesh::ModelIdentity& model)
    : cache_(cache), tier_(tier), model_(PrefixModel(model.digest(), model.state_layout())) {}

void PrefixKeeper::Open(const mesh::CacheHints& hints, std::span<const TokenId> tokens,
                        int64_t reach, KeptPrompt* prompt) const {
  CHECK(reach % kBlockTokens == 0 && reach >= 0 && reach <= static_cast<int64_t>(tokens.size()),
        "%d of %d tokens", reach, tokens.size());
  prompt->reach = reach;
  if (cache_ == nullptr || hints.off()) return;
  prompt->chain.emplace(model_, hints.salt());
  prompt->chain->Append(tokens);
  prompt->session = hints.session();
  prompt->breakpoints.assign(hints.breakpoints().begin(), hints.breakpoints().end());
  prompt->junction = static_cast<int64_t>(std::min(hints.junction(), static_cast<uint64_t>(reach)));
}

StateLoadRef PrefixKeeper::Load(const KeptPrompt& prompt, double tokens_per_second,
                                absl::Time now) {
  if (!prompt.chain || tier_ == nullptr) return nullptr;
  return tier_->Load(prompt.path(), tokens_per_second, now);
}

void PrefixKeeper::Poll(absl::Time now) {
  if (tier_ != nullptr) tier_->Poll(now);
}

absl::Status PrefixKeeper::Restore(KeptPrompt* prompt, SequenceSpec* spec, absl::Time now) {
  if (!prompt->chain) return absl::OkStatus();
  const PrefixMatch match = cache_->Find(prompt->path());
  ASSIGN_OR_RETURN(spec->state, cache_->Restore(prompt->path(), now, prompt->chain->tenant()));
  prompt->restored = spec->state == nullptr ? 0 : spec->state->position();
  PlanCuts(prompt, match, spec);
  return absl::OkStatus();
}

absl::Status PrefixKeeper::Adopt(KeptPrompt* prompt, std::unique_ptr<SequenceState> state,
                                 SequenceSpec* spec, absl::Time now) {
  CHECK(prompt->chain && state->position() <= prompt->reach, "a state at %d of a prompt's %d",
        state->position(), prompt->reach);
  if (Held(*prompt) >= state->position()) {
    state.reset();  // its slab may be the last one
    return Restore(prompt, spec, now);
  }
  KeepArrived(*prompt, *state, now);
  prompt->restored = state->position();
  spec->state = std::move(state);
  PlanCuts(prompt, cache_->Find(prompt->path()), spec);
  return absl::OkStatus();
}

int64_t PrefixKeeper::Held(const KeptPrompt& prompt) const {
  return prompt.chain ? cache_->Find(prompt.path()).snapshot.value() * kBlockTokens : 0;
}

// What was restored may stand above what the cache holds, when it had no room for it.
void PrefixKeeper::PlanCuts(KeptPrompt* prompt, const PrefixMatch& match, SequenceSpec* spec) {
  prompt->cuts = cache_->Plan(prompt->path(), match,
                              {.breakpoints = prompt->breakpoints, .junction = prompt->junction});
  std::erase_if(prompt->cuts,
                [&](const CutPoint& cut) { return cut.blocks * kBlockTokens <= prompt->restored; });
  for (const CutPoint& cut : prompt->cuts) spec->cuts.push_back(cut.blocks * kBlockTokens);
  spec->at_cut = [this, prompt](const SequenceState& state) { AtCut(prompt, state); };
}

std::vector<SlotRef> PrefixKeeper::Latents(const KeptPrompt& prompt) const {
  if (!prompt.chain) return {};
  return cache_->Latents(prompt.path());
}

void PrefixKeeper::KeepArrived(const KeptPrompt& prompt, const SequenceState& state,
                               absl::Time now) {
  if (!prompt.chain || state.position() == 0) return;
  cache_->Keep(prompt.path(), state,
               {.kind = SnapshotKind::kPromptTail,
                .session = prompt.session,
                .tenant = prompt.chain->tenant()},
               now);
}

void PrefixKeeper::WatchAnswer(KeptPrompt* prompt, SequenceSpec* spec) {
  if (!prompt->chain) return;
  spec->cut_answer = true;
  spec->at_cut = [this, prompt](const SequenceState& state) { AtCut(prompt, state); };
}

void PrefixKeeper::AtCut(KeptPrompt* prompt, const SequenceState& state) {
  if (state.position() > prompt->reach) {
    prompt->answer.reset();  // its room is what the new one takes
    absl::StatusOr<StagedSnapshot> staged = cache_->StageSpeculative(state);
    if (staged.ok()) prompt->answer = *std::move(staged);
    return;
  }
  const int64_t blocks = state.position() / kBlockTokens;
  const auto cut = std::find_if(prompt->cuts.begin(), prompt->cuts.end(),
                                [blocks](const CutPoint& c) { return c.blocks == blocks; });
  CHECK(cut != prompt->cuts.end(), "an unplanned cut at %d", state.position());
  cache_->Keep(prompt->path(), state,
               {.kind = cut->kind, .session = prompt->session, .tenant = prompt->chain->tenant()},
               now_);
}

void PrefixKeeper::Generated(KeptPrompt* prompt, std::span<const TokenId> tokens) const {
  if (prompt->chain) prompt->chain->Append(tokens);
}

void PrefixKeeper::KeepAnswer(KeptPrompt* prompt, absl::Time now) {
  if (!prompt->answer) return;
  const SnapshotSpec spec = {.blocks = prompt->answer->blocks,
                             .kind = SnapshotKind::kAnswerEnd,
                             .session = prompt->session,
                             .tenant = prompt->chain->tenant()};
  cache_->Publish(prompt->chain->keys(), *std::exchange(prompt->answer, std::nullopt), spec, now);
}

void PrefixKeeper::AddReclaimable(mesh::Heartbeat* load) {
  if (cache_ == nullptr) return;
  if (now_ - counted_ >= kCountEvery) {
    counted_ = now_;
    reclaimable_ = cache_->ReclaimableBlocks();
  }
  load->set_latent_blocks_free(load->latent_blocks_free() + static_cast<uint64_t>(reclaimable_));
}

void PrefixKeeper::AddStoreRates(mesh::Heartbeat* load) const {
  if (tier_ == nullptr) return;
  load->set_store_bytes_per_second(tier_->bytes_per_second(StoreTier::kDisk));
  load->set_object_bytes_per_second(tier_->bytes_per_second(StoreTier::kObjects));
}

void PrefixKeeper::AddMetrics(MetricList& list) const {
  const bool on = cache_ != nullptr;
  const PrefixCacheStats s = on ? cache_->stats() : PrefixCacheStats();
  const PrefixTreeStats tree = on ? cache_->tree().stats() : PrefixTreeStats();
  const char* tokens =
      "Tokens of whole blocks of prompts: asked for, with latents here, restored from a snapshot.";
  list.Counter("prefix_tokens_total", tokens, s.tokens_looked_up, {{"kind", "asked"}});
  list.Counter("prefix_tokens_total", tokens, s.tokens_latent, {{"kind", "latent"}});
  list.Counter("prefix_tokens_total", tokens, s.tokens_restored, {{"kind", "restored"}});
  const char* lookups = "Prompts looked up in the prefix cache, by result.";
  list.Counter("prefix_lookups_total", lookups, s.hits, {{"result", "hit"}});
  list.Counter("prefix_lookups_total", lookups, s.lookups - s.hits, {{"result", "miss"}});
  const char* snapshots = "Snapshots of the prefix cache, by what happened to them.";
  list.Counter("prefix_snapshots_total", snapshots, s.snapshots_taken, {{"event", "taken"}});
  list.Counter("prefix_snapshots_total", snapshots, s.snapshots_refused, {{"event", "refused"}});
  list.Counter("prefix_snapshots_total", snapshots, tree.superseded, {{"event", "superseded"}});
  list.Counter("prefix_snapshots_total", snapshots, tree.evicted, {{"event", "evicted"}});
  list.Counter("prefix_snapshots_total", snapshots, tree.over_share, {{"event", "over_share"}});
  list.Gauge("prefix_bytes", "Bytes of the prefix cache: snapshots and latents it holds.",
             on ? cache_->tree().bytes() : 0);
  list.Gauge("prefix_snapshots", "Snapshots held.", tree.snapshots);
  list.Gauge("prefix_grid_tokens", "Step of the snapshots within long prompts now; 0: none.",
             on ? cache_->planner().grid_blocks() * kBlockTokens : 0);
  const char* switches = "How often the traffic turned such a grid on and off.";
  list.Counter("prefix_grid_switches_total", switches, on ? cache_->planner().switched_on() : 0,
               {{"to", "on"}});
  list.Counter("prefix_grid_switches_total", switches, on ? cache_->planner().switched_off() : 0,
               {{"to", "off"}});
  list.Gauge("pool_reclaimable_slots",
             "Slots that only the prefix cache holds; it gives them up when asked.", reclaimable_,
             {{"pool", "latent_block"}});
  if (tier_ != nullptr) {
    tier_->AddMetrics(list);
  } else {
    StateTier::AddNoMetrics(list);
  }
}

}  // namespace deltamesh
