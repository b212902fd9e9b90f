#include "runtime/cache/sequence_state.h"

#include <gtest/gtest.h>

namespace deltamesh {
namespace {

// Kimi K3's shape: the byte counts of model.md section 12 (float32 latents take twice the bf16 figure).
StateLayout K3Layout() {
  return {.kda_layers = 69,
          .heads = 96,
          .dim = 128,
          .conv_taps = 4,
          .mla_layers = 24,
          .rank = 512,
          .rope = 64};
}
StateLayout Tiny() {
  return {
      .kda_layers = 2, .heads = 3, .dim = 4, .conv_taps = 4, .mla_layers = 2, .rank = 5, .rope = 2};
}

TEST(StateLayout, SizesOfTheRealModel) {
  const StateLayout l = K3Layout();
  EXPECT_EQ(l.kda_layers * l.s_floats() * 4, 434'110'464);
  EXPECT_EQ(l.kda_layers * l.conv_floats() * 2, 15'261'696);  // as bf16 there
  EXPECT_EQ(l.block_bytes() / kBlockTokens, 2 * 27'648);
}

TEST(SequenceState, StartsEmptyWithAnEmptyTile) {
  StatePools pools = *StatePools::Create(Tiny(), 1, 4);
  SlotRef dirty = *pools.slabs->Take();
  std::fill_n(dirty.data(), pools.layout.slab_floats(), 9.0f);
  dirty = SlotRef();
  auto state = *SequenceState::Create(pools);
  for (int64_t i = 0; i < 2; ++i) {
    const SlabLayer layer = state->slab_layer(i);
    EXPECT_EQ(layer.s[47], 0);
    EXPECT_EQ(layer.conv[3 * 3 * 12 - 1], 0);
    EXPECT_EQ(layer.decay[11], 1);
    EXPECT_EQ(layer.khat[3 * 4 * 16 - 1], 0);
    EXPECT_EQ(layer.u[3 * 4 * 16 - 1], 0);
  }
  EXPECT_EQ(state->slab_layer(1).u + pools.layout.u_floats(),
            state->slab().data() + pools.layout.slab_floats());
}

TEST(SequenceState, ReserveTakesWholeBlocksOrNothing) {
  StatePools pools = *StatePools::Create(Tiny(), 2, 3);
  auto state = *SequenceState::Create(pools);
  ASSERT_TRUE(state->Reserve(64).ok());
  EXPECT_EQ(state->blocks().size(), 1u);
  state->Advance(64);
  ASSERT_TRUE(state->Reserve(1).ok());
  EXPECT_EQ(state->blocks().size(), 2u);
  EXPECT_EQ(state->Reserve(200).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(state->blocks().size(), 2u);
  EXPECT_EQ(pools.blocks->free_slots(), 1);
  state.reset();
  EXPECT_EQ(pools.blocks->free_slots(), 3);
  EXPECT_EQ(pools.slabs->free_slots(), 2);
}

TEST(SequenceState, NoSlabIsAStatus) {
  StatePools pools = *StatePools::Create(Tiny(), 1, 3);
  auto a = *SequenceState::Create(pools);
  EXPECT_EQ(SequenceState::Create(pools).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(SequenceState, RestoreKeepsTheSlabAndEmptiesTheTile) {
  StatePools pools = *StatePools::Create(Tiny(), 1, 3);
  auto state = *SequenceState::Create(pools);
  state->slab_layer(1).s[5] = 2.5f;
  state->slab_layer(1).khat[5] = 2.5f;
  std::vector<SlotRef> blocks = {*pools.blocks->Take(), *pools.blocks->Take()};
  state->Restore(128, std::move(blocks));
  EXPECT_EQ(state->position(), 128);
  EXPECT_EQ(state->slab_layer(1).s[5], 2.5f);
  EXPECT_EQ(state->slab_layer(1).khat[5], 0.0f);
  EXPECT_EQ(state->block_layer(1, 1), state->blocks()[1].data() + 64 * 7);
}

// Placing relies on the empty tile that every sequence begins with.
TEST(SequenceState, OnePlacedWithoutWorkHasAnEmptyTile) {
  StatePools pools = *StatePools::Create(Tiny(), 1, 3);
  {
    auto used = *SequenceState::Create(pools);
    const SlabLayer layer = used->slab_layer(1);
    layer.decay[5] = layer.khat[5] = layer.u[5] = 2.5f;
  }
  auto state = *SequenceState::CreateUnset(pools);
  const SlabLayer layer = state->slab_layer(1);
  layer.s[5] = 1.5f;
  state->Place(64, {*pools.blocks->Take()});
  EXPECT_EQ(state->position(), 64);
  EXPECT_EQ(layer.s[5], 1.5f);
  EXPECT_EQ(layer.decay[5], 1.0f);
  EXPECT_EQ(layer.khat[5], 0.0f);
  EXPECT_EQ(layer.u[5], 0.0f);
}

TEST(SequenceStateDeathTest, OneThatWasAdvancedIsNotPlaced) {
  StatePools pools = *StatePools::Create(Tiny(), 1, 3);
  auto state = *SequenceState::Create(pools);
  ASSERT_TRUE(state->Reserve(65).ok());
  state->Advance(65);
  EXPECT_DEATH(state->Place(64, state->blocks()), "the open tile of a sequence at 65 is in use");
  state->Restore(64, state->blocks());
  state->Place(128, state->blocks());
}

TEST(SequenceStateDeathTest, OnlyBlockBoundariesCanBeRestored) {
  StatePools pools = *StatePools::Create(Tiny(), 1, 3);
  auto state = *SequenceState::Create(pools);
  EXPECT_DEATH(state->Restore(65, {}), "not a block boundary");
  EXPECT_DEATH(state->Advance(1), "beyond 0 reserved blocks");
}

}  // namespace
}  // namespace deltamesh
