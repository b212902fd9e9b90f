#include "runtime/cache/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

static_assert(kPrefixBlockTokens == kBlockTokens);

constexpr int64_t kSnapshotsMax = int64_t{1} << 20;
constexpr int64_t kLeastSnapshotBytes = 4096;  // a model may have no recurrent layer

PrefixTreeOptions TreeOptions(const PrefixCacheOptions& options, const StateLayout& layout) {
  PrefixTreeOptions tree;
  tree.bytes_max = options.bytes_max;
  tree.block_bytes = layout.block_bytes();
  tree.snapshot_bytes = std::max(layout.snapshot_bytes(), kLeastSnapshotBytes);
  tree.tails_kept = options.tails_kept;
  tree.breakpoint_share = options.breakpoint_share;
  return tree;
}

// S and conv lie side by side in a slab layer.
int64_t KeptFloats(const StateLayout& layout) { return layout.s_floats() + layout.conv_floats(); }

}  // namespace

absl::StatusOr<std::unique_ptr<PrefixCache>> PrefixCache::Create(const PrefixCacheOptions& options,
                                                                 const StatePools& pools) {
  if (options.bytes_max < 0) {
    return InvalidArgument("prefix cache: %d bytes; use 0 for none", options.bytes_max);
  }
  const int64_t bytes = std::max(pools.layout.snapshot_bytes(), kLeastSnapshotBytes);
  ASSIGN_OR_RETURN(
      std::shared_ptr<FixedPool> snapshots,
      FixedPool::Create("snapshot pool", std::min(options.bytes_max / bytes, kSnapshotsMax),
                        pools.layout.kda_layers * KeptFloats(pools.layout)));
  return std::unique_ptr<PrefixCache>(new PrefixCache(options, pools, std::move(snapshots)));
}

PrefixCache::PrefixCache(const PrefixCacheOptions& options, const StatePools& pools,
                         std::shared_ptr<FixedPool> snapshots)
    : options_(options),
      pools_(pools),
      snapshots_(std::move(snapshots)),
      tree_(TreeOptions(options, pools.layout)),
      planner_(options.plan, options.learning) {
  pools_.blocks->SetReclaim([this] { return GiveBack(); }, [this] { return ReclaimableBlocks(); });
}

PrefixCache::~PrefixCache() { pools_.blocks->SetReclaim(nullptr, nullptr); }

absl::StatusOr<std::unique_ptr<SequenceState>> PrefixCache::Restore(std::span<const PrefixKey> path,
                                                                    absl::Time now,
                                                                    uint64_t tenant) {
  const PrefixMatch match = tree_.Find(path);
  ++stats_.lookups;
  stats_.tokens_looked_up += path.size() * kBlockTokens;
  stats_.tokens_latent += static_cast<uint64_t>(match.latents.value() * kBlockTokens);
  if (match.snapshot.value() == 0) return nullptr;
  const PrefixKey& key = path[static_cast<size_t>(match.snapshot.value() - 1)];
  const SlotRef content = held_snapshots_.at(tree_.SnapshotId(key));
  std::vector<SlotRef> latents = Latents(path.first(static_cast<size_t>(match.snapshot.value())));
  ASSIGN_OR_RETURN(std::unique_ptr<SequenceState> state, SequenceState::CreateUnset(pools_));
  const int64_t floats = KeptFloats(pools_.layout);
  for (int64_t layer = 0; layer < pools_.layout.kda_layers; ++layer) {
    std::copy_n(content.data() + layer * floats, floats, state->slab_layer(layer).s);
  }
  state->Place(match.snapshot.value() * kBlockTokens, std::move(latents));
  tree_.Touch(key, now, tenant);
  ++stats_.hits;
  stats_.tokens_restored += static_cast<uint64_t>(match.snapshot.value() * kBlockTokens);
  return state;
}

std::vector<SlotRef> PrefixCache::Latents(std::span<const PrefixKey> path) const {
  std::vector<SlotRef> latents;
  for (const uint64_t id : tree_.BlockIds(path, tree_.Find(path).latents.value())) {
    latents.push_back(held_latents_.at(id));
  }
  return latents;
}

std::vector<CutPoint> PrefixCache::Plan(std::span<const PrefixKey> path, const PrefixMatch& match,
                                        const CutHints& hints) {
  return planner_.Plan(tree_, path, match, hints);
}

absl::StatusOr<SlotRef> PrefixCache::TakeSnapshot() {
  for (;;) {
    absl::StatusOr<SlotRef> slot = snapshots_->Take();
    if (slot.ok()) return slot;
    if (!GiveBack()) {
      ++stats_.snapshots_refused;
      return slot.status();
    }
  }
}

StagedSnapshot PrefixCache::Hold(std::span<const PrefixKey> path) const {
  StagedSnapshot held;
  held.blocks = static_cast<int64_t>(path.size());
  held.content = held_snapshots_.at(tree_.SnapshotId(path.back()));
  held.latents = Latents(path);
  return held;
}

absl::StatusOr<StagedSnapshot> PrefixCache::Reserve(std::span<const PrefixKey> path) {
  const int64_t most = std::max<int64_t>(1, snapshots_->slots() / 4);
  if (arriving_.use_count() - 1 >= most) {
    return ResourceExhausted("%d snapshots are being read, a quarter of the pool", most);
  }
  StagedSnapshot staged;
  staged.blocks = static_cast<int64_t>(path.size());
  staged.speculative = arriving_;
  staged.latents = Latents(path);  // held from here on, whatever makes room below
  ASSIGN_OR_RETURN(staged.content, TakeSnapshot());
  const int64_t missing = staged.blocks - static_cast<int64_t>(staged.latents.size());
  if (!pools_.blocks->CouldTake(missing)) {
    return ResourceExhausted("%d latent blocks are not to be had now", missing);
  }
  while (static_cast<int64_t>(staged.latents.size()) < staged.blocks) {
    ASSIGN_OR_RETURN(SlotRef block, pools_.blocks->Take());
    staged.latents.push_back(std::move(block));
  }
  return staged;
}

void PrefixCache::Forget(std::span<const PrefixKey> path) {
  if (path.empty() || !tree_.HasSnapshot(path.back())) return;
  for (int64_t above = tree_.Find(path).snapshot.value(); above > 0;
       above = tree_.Find(path).snapshot.value()) {
    const PrefixKey& key = path[static_cast<size_t>(above - 1)];
    const SnapshotKind kind = tree_.View(key).kind;
    if (tree_.HasChildren(key) ||
        (kind != SnapshotKind::kPromptTail && kind != SnapshotKind::kAnswerEnd)) {
      break;
    }
    tree_.Drop(key);
  }
  Follow(nullptr);
}

absl::StatusOr<StagedSnapshot> PrefixCache::Stage(const SequenceState& state) {
  const int64_t position = state.position();
  CHECK(position > 0 && position % kBlockTokens == 0, "a snapshot at position %d", position);
  StagedSnapshot staged;
  staged.blocks = position / kBlockTokens;
  ASSIGN_OR_RETURN(staged.content, TakeSnapshot());
  const int64_t floats = KeptFloats(pools_.layout);
  for (int64_t layer = 0; layer < pools_.layout.kda_layers; ++layer) {
    std::copy_n(state.slab_layer(layer).s, floats, staged.content.data() + layer * floats);
  }
  staged.latents.assign(state.blocks().begin(), state.blocks().begin() + staged.blocks);
  return staged;
}

absl::StatusOr<StagedSnapshot> PrefixCache::StageSpeculative(const SequenceState& state) {
  const int64_t most = std::max<int64_t>(1, snapshots_->slots() / 4);
  if (speculative_.use_count() - 1 >= most) {
    ++stats_.snapshots_refused;
    return ResourceExhausted("%d snapshots of running answers are held, a quarter of the pool",
                             most);
  }
  ASSIGN_OR_RETURN(StagedSnapshot staged, Stage(state));
  staged.speculative = speculative_;
  return staged;
}

bool PrefixCache::Publish(std::span<const PrefixKey> path, StagedSnapshot staged,
                          const SnapshotSpec& spec, absl::Time now) {
  CHECK(spec.blocks == staged.blocks, "a snapshot of %d blocks at block %d", staged.blocks,
        spec.blocks);
  std::vector<uint64_t> ids;
  for (const SlotRef& block : staged.latents) ids.push_back(static_cast<uint64_t>(block.index()));
  const uint64_t id = static_cast<uint64_t>(staged.content.index());
  const bool kept = tree_.Insert(path, ids, id, spec, now);
  Follow(&staged);
  ++(kept ? stats_.snapshots_taken : stats_.snapshots_refused);
  return kept;
}

bool PrefixCache::Keep(std::span<const PrefixKey> path, const SequenceState& state,
                       SnapshotSpec spec, absl::Time now) {
  spec.blocks = state.position() / kBlockTokens;
  CHECK(spec.blocks >= 1 && static_cast<size_t>(spec.blocks) <= path.size(),
        "a snapshot at position %d of a path of %d blocks", state.position(), path.size());
  if (tree_.HasSnapshot(path[static_cast<size_t>(spec.blocks - 1)])) {
    const std::vector<uint64_t> ids = tree_.BlockIds(path, spec.blocks);
    tree_.Insert(path, ids, 0, spec, now);
    Follow(nullptr);
    return true;
  }
  absl::StatusOr<StagedSnapshot> staged = Stage(state);
  return staged.ok() && Publish(path, *std::move(staged), spec, now);
}

int64_t PrefixCache::ReclaimableBlocks() const {
  std::vector<int64_t> slots;
  slots.reserve(held_latents_.size());
  for (const auto& [slot, ref] : held_latents_) slots.push_back(static_cast<int64_t>(slot));
  return pools_.blocks->CountUnshared(slots);
}

bool PrefixCache::GiveBack() {
  if (!tree_.EvictOne()) return false;
  Follow(nullptr);
  return true;
}

void PrefixCache::Clear() {
  tree_.Clear();
  Follow(nullptr);
}

void PrefixCache::Follow(const StagedSnapshot* staged) {
  for (const PrefixChange& change : tree_.TakeChanges()) {
    switch (change.what) {
      case PrefixChange::kBlockAdded:
        held_latents_.emplace(change.id, staged->latents[static_cast<size_t>(change.blocks - 1)]);
        break;
      case PrefixChange::kBlockDropped:
        CHECK(held_latents_.erase(change.id) == 1, "latents %d", change.id);
        break;
      case PrefixChange::kSnapshotAdded:
        held_snapshots_.emplace(change.id, staged->content);
        break;
      case PrefixChange::kSnapshotDropped:
        CHECK(held_snapshots_.erase(change.id) == 1, "snapshot %d", change.id);
        break;
    }
    untold_.push_back(change);
  }
}

std::vector<PrefixChange> PrefixCache::TakeChanges() { return std::exchange(untold_, {}); }

}  // namespace deltamesh
