#include "services/cli/long_run.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iostream>

#include "runtime/base/clock.h"
#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "services/cli/bench_pools.h"
#include "services/cli/bench_rows.h"
#include "services/cli/bench_tokens.h"
#include "services/cli/load_progress.h"

namespace deltamesh {
namespace {

constexpr int64_t kRoom = 256;  // positions for steps behind the longest context

}  // namespace

LongRun::LongRun(std::unique_ptr<Model> model, int threads)
    : model_(std::move(model)), pool_(threads), experts_(&model_->experts(), &pool_) {
  logits_.resize(static_cast<size_t>(model_->config().vocab));
}

absl::StatusOr<std::unique_ptr<LongRun>> LongRun::Create(const std::string& model,
                                                         const LongRunOptions& o, int64_t tokens) {
  const SystemClock clock;
  ASSIGN_OR_RETURN(const LoadOptions load,
                   ToolLoadOptions(model, o.threads, o.weights, o.activations, o.packed_dir, &clock,
                                   &std::cerr));
  ASSIGN_OR_RETURN(std::unique_ptr<Model> loaded, Model::Load(model, load));
  RETURN_IF_ERROR(CheckBenchVocab(loaded->config().vocab));
  std::unique_ptr<LongRun> run(new LongRun(std::move(loaded), o.threads));
  const int64_t blocks = (tokens + kRoom + kBlockTokens - 1) / kBlockTokens;
  ASSIGN_OR_RETURN(run->pools_, BenchPools(run->model_->state_layout(), 1, blocks * kBlockTokens));
  for (int64_t i = 0; i < blocks; ++i) {
    ASSIGN_OR_RETURN(SlotRef block, run->pools_.blocks->Take());
    run->blocks_.push_back(std::move(block));
  }
  RETURN_IF_ERROR(run->Restart());
  return run;
}

absl::Status LongRun::Restart() {
  state_.reset();
  ASSIGN_OR_RETURN(state_, SequenceState::Create(pools_));
  state_->Restore(0, blocks_);
  return absl::OkStatus();
}

absl::Status LongRun::Return(int64_t position) {
  state_->Restore(position, blocks_);
  return absl::OkStatus();
}

absl::StatusOr<PromptTime> LongRun::Feed(int64_t tokens, int64_t chunk) {
  PromptTime time;
  const double start = BenchSeconds();
  double mark = start;
  for (int64_t done = 0; done < tokens;) {
    std::vector<TokenId> ids(static_cast<size_t>(std::min(chunk, tokens - done)));
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = Token(state_->position() + static_cast<int64_t>(i));
    }
    done += std::ssize(ids);
    SequenceChunk part = {.state = state_.get(), .tokens = ids, .layer_done = nullptr};
    mark = BenchSeconds();
    part.layer_done = [&](int64_t layer) {
      const double now = BenchSeconds();
      const LayerKind& kind = model_->config().layers[static_cast<size_t>(layer)];
      (kind.mixer == MixerKind::kKda ? time.kda : time.mla) += now - mark;
      mark = now;
    };
    RETURN_IF_ERROR(model_->Forward({&part, 1}, experts_, pool_));
  }
  time.total = BenchSeconds() - start;
  return time;
}

absl::Status LongRun::Fill(int64_t tokens) {
  const StateLayout& l = state_->layout();
  SeededEntropy bits(1);
  const auto number = [&] {  // in [-1.73, 1.73): variance 1, as a norm leaves it
    return static_cast<float>((0x1p-52 * static_cast<double>(bits.Next() >> 11) - 1) * 1.7320508);
  };
  // Rows differ within a block and blocks are turned against each other: as good as all different.
  std::vector<float> pattern(static_cast<size_t>(l.block_floats()));
  for (float& v : pattern) v = number();
  const auto floats = static_cast<int64_t>(pattern.size());
  for (int64_t b = 0; b * kBlockTokens < tokens && floats > 0; ++b) {
    const auto turn = pattern.begin() + b * 977 % floats;
    std::rotate_copy(pattern.begin(), turn, pattern.end(), blocks_[static_cast<size_t>(b)].data());
  }
  for (int64_t i = 0; i < l.kda_layers; ++i) {
    const SlabLayer slab = state_->slab_layer(i);
    for (int64_t k = 0; k < l.s_floats(); ++k) slab.s[k] = 0.1f * number();
    for (int64_t k = 0; k < l.conv_floats(); ++k) slab.conv[k] = number();
  }
  return Return(tokens);
}

absl::StatusOr<double> LongRun::Step() {
  const TokenId id = Token(state_->position());
  SequenceChunk part = {.state = state_.get(),
                        .tokens = {&id, 1},
                        .logits = 1,
                        .out = logits_.data(),
                        .layer_done = nullptr};
  const double start = BenchSeconds();
  RETURN_IF_ERROR(model_->Forward({&part, 1}, experts_, pool_));
  const double seconds = BenchSeconds() - start;
  for (const float logit : logits_) {
    if (!std::isfinite(logit)) return Internal("a logit is %g; nothing was measured", logit);
  }
  return seconds;
}

TokenId LongRun::Token(int64_t position) const {
  return BenchToken(0, static_cast<uint64_t>(position), model_->config().vocab);
}

int64_t LongRun::CacheBytes(int64_t position) const {
  const StateLayout& l = model_->state_layout();
  return (position + kBlockTokens - 1) / kBlockTokens * l.block_bytes() + l.slab_bytes();
}

int64_t LongRun::PoolBytes() const {
  return CacheBytes(static_cast<int64_t>(blocks_.size()) * kBlockTokens);
}

absl::StatusOr<int64_t> ParseTokenCount(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const std::string suffix(rest, end);
  const int64_t unit = suffix == "k" ? 1 << 10 : suffix == "M" ? 1 << 20 : 1;
  constexpr int64_t kMost = int64_t{1} << 30;
  if (error != std::errc() || (unit == 1 && !suffix.empty()) || value < 1 || value > kMost / unit) {
    return InvalidArgument("context: \"%s\"; use a number of tokens such as 4096, 128k or 1M",
                           text);
  }
  return value * unit;
}

std::string TokenCountText(int64_t tokens) {
  if (tokens % (1 << 20) == 0) return absl::StrFormat("%dM", tokens >> 20);
  if (tokens % (1 << 10) == 0) return absl::StrFormat("%dk", tokens >> 10);
  return absl::StrFormat("%d", tokens);
}

}  // namespace deltamesh
