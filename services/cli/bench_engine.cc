#include "services/cli/bench_engine.h"

#include <algorithm>

#include "runtime/base/status.h"
#include "services/cli/bench_pools.h"
#include "services/cli/bench_tokens.h"

namespace deltamesh {
absl::Status BenchEngine::Restart(int64_t sequences, int64_t tokens, uint64_t first) {
  first_ = first;
  states_.clear();
  kept_blocks_.clear();
  pools_ = {};  // before there are others
  ASSIGN_OR_RETURN(pools_, BenchPools(model_->state_layout(), sequences, tokens));
  for (int64_t s = 0; s < sequences; ++s) {
    ASSIGN_OR_RETURN(std::unique_ptr<SequenceState> state, SequenceState::Create(pools_));
    RETURN_IF_ERROR(state->Reserve(tokens));
    states_.push_back(std::move(state));
  }
  logits_.resize(static_cast<size_t>(sequences * model_->config().vocab));
  return absl::OkStatus();
}

absl::Status BenchEngine::Feed(int64_t tokens) {
  for (size_t s = 0; s < states_.size(); ++s) {
    for (int64_t done = 0; done < tokens;) {
      const int64_t n = std::min(chunk_tokens_, tokens - done);
      std::vector<TokenId> ids;
      for (int64_t i = 0; i < n; ++i) ids.push_back(Token(s, states_[s]->position() + i));
      done += n;
      SequenceChunk chunk = {.state = states_[s].get(), .tokens = ids, .layer_done = nullptr};
      if (done == tokens) {
        chunk.logits = 1;
        chunk.out = logits_.data() + static_cast<int64_t>(s) * model_->config().vocab;
      }
      RETURN_IF_ERROR(model_->Forward({&chunk, 1}, experts_, pool_));
    }
  }
  return absl::OkStatus();
}

absl::Status BenchEngine::Step(bool greedy) {
  std::vector<TokenId> ids(states_.size());
  std::vector<SequenceChunk> batch;
  for (size_t s = 0; s < states_.size(); ++s) {
    ids[s] = greedy ? Likeliest(s) : Token(s, states_[s]->position());
    batch.push_back({.state = states_[s].get(),
                     .tokens = {&ids[s], 1},
                     .logits = 1,
                     .out = logits_.data() + static_cast<int64_t>(s) * model_->config().vocab,
                     .layer_done = nullptr});
  }
  return model_->Forward(batch, experts_, pool_);
}

void BenchEngine::Keep() {
  const SequenceState& state = *states_.front();
  const float* slab = state.slab().data();
  kept_slab_.assign(slab, slab + state.layout().slab_floats());
  kept_position_ = state.position();
  const auto full = static_cast<size_t>(kept_position_ / kBlockTokens);
  kept_blocks_.assign(state.blocks().begin(),
                      state.blocks().begin() + static_cast<std::ptrdiff_t>(full));
}

absl::Status BenchEngine::Return(int64_t tokens) {
  states_.clear();
  ASSIGN_OR_RETURN(std::unique_ptr<SequenceState> state, SequenceState::Create(pools_));
  std::copy(kept_slab_.begin(), kept_slab_.end(), state->slab().data());
  state->Restore(kept_position_, kept_blocks_);
  RETURN_IF_ERROR(state->Reserve(tokens));
  states_.push_back(std::move(state));
  return absl::OkStatus();
}

TokenId BenchEngine::Token(size_t sequence, int64_t position) const {
  return BenchToken(first_ + sequence, static_cast<uint64_t>(position), model_->config().vocab);
}

TokenId BenchEngine::Likeliest(size_t sequence) const {
  const int64_t vocab = model_->config().vocab;
  const float* row = logits_.data() + static_cast<int64_t>(sequence) * vocab;
  return static_cast<TokenId>(std::max_element(row, row + vocab) - row);
}

}  // namespace deltamesh
