#include "services/cli/logits.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iostream>
#include <memory>
#include <numeric>
#include <span>
#include <string_view>
#include <system_error>

#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/base/thread_pool.h"
#include "runtime/cache/sequence_state.h"
#include "runtime/expert/local_experts.h"
#include "runtime/model/model.h"
#include "runtime/model/state_view.h"
#include "services/cli/load_progress.h"
#include "services/cli/npy.h"

namespace deltamesh {

namespace {

// Logits of one call are held in memory: 4 GiB of them.
constexpr int64_t kLogitsPerCallMax = int64_t{1} << 30;
constexpr int kThreadsMax = 1024;

absl::Status CheckOptions(const LogitsOptions& o) {
  if (o.model.empty()) return InvalidArgument("model: no folder given; use --model DIR");
  if (o.out.empty()) return InvalidArgument("out: no file given; use --out FILE");
  if (o.tokens.empty()) return InvalidArgument("tokens: none given; use --tokens 1,2,3");
  if (o.threads < 1 || o.threads > kThreadsMax) {
    return InvalidArgument("threads: %d; use 1 to %d", o.threads, kThreadsMax);
  }
  return absl::OkStatus();
}

absl::Status CheckAgainstModel(const LogitsOptions& o, const std::vector<int64_t>& calls,
                               const ModelConfig& config) {
  for (size_t i = 0; i < o.tokens.size(); ++i) {
    if (o.tokens[i] < 0 || o.tokens[i] >= config.vocab) {
      return InvalidArgument("tokens: entry %d is %d; this model has ids 0 to %d", i, o.tokens[i],
                             config.vocab - 1);
    }
  }
  const int64_t longest = *std::max_element(calls.begin(), calls.end());
  const int64_t limit = std::min(kForwardTokensMax, kLogitsPerCallMax / config.vocab);
  if (longest > limit) {
    return InvalidArgument("feed: a call of %d tokens; use chunks of at most %d here", longest,
                           limit);
  }
  return absl::OkStatus();
}

absl::Status WriteStates(const ModelConfig& config, const SequenceState& state,
                         const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return InvalidArgument("%s: cannot create the folder: %s; choose a writable --out", folder,
                           error.message());
  }
  const StateLayout& l = state.layout();
  for (int64_t layer = 0; layer < config.layer_count(); ++layer) {
    const LayerKind& kind = config.layers[static_cast<size_t>(layer)];
    const auto path = [&](const char* name) {
      return folder + "/" + name + "." + std::to_string(layer) + ".npy";
    };
    const int64_t i = kind.mixer_index;
    if (kind.mixer == MixerKind::kKda) {
      RETURN_IF_ERROR(WriteNpy(path("S"), {l.heads, l.dim, l.dim}, RecurrentState(state, i)));
      RETURN_IF_ERROR(
          WriteNpy(path("conv"), {3, l.conv_taps - 1, l.channels()}, ConvTails(state, i)));
    } else {
      RETURN_IF_ERROR(WriteNpy(path("latent"), {state.position(), l.rank}, Latents(state, i)));
      RETURN_IF_ERROR(WriteNpy(path("k_rope"), {state.position(), l.rope}, ExtraKeys(state, i)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> ParseFeed(const std::string& feed, int64_t tokens) {
  if (feed == "all") return std::vector<int64_t>{tokens};
  if (feed == "step") return std::vector<int64_t>(static_cast<size_t>(tokens), 1);
  constexpr std::string_view kChunks = "chunks:";
  if (!feed.starts_with(kChunks)) {
    return InvalidArgument("feed: '%s'; use all, step, or chunks:5,1,7", feed);
  }
  std::vector<int64_t> sizes;
  const char* at = feed.data() + kChunks.size();
  const char* const end = feed.data() + feed.size();
  for (;;) {
    int64_t size = 0;
    const auto [next, error] = std::from_chars(at, end, size);
    if (error != std::errc() || size < 1 || size > tokens || (next != end && *next != ',')) {
      return InvalidArgument(
          "feed: '%s'; sizes must be whole numbers from 1 to %d, as in chunks:5,1,7", feed, tokens);
    }
    sizes.push_back(size);
    if (next == end) break;
    at = next + 1;
  }
  const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  if (sum != tokens) {
    return InvalidArgument("feed: '%s' adds up to %d; give sizes for all %d tokens", feed, sum,
                           tokens);
  }
  return sizes;
}

absl::Status RunLogits(const LogitsOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  const auto tokens = static_cast<int64_t>(options.tokens.size());
  ASSIGN_OR_RETURN(const std::vector<int64_t> calls, ParseFeed(options.feed, tokens));
  const SystemClock clock;
  ASSIGN_OR_RETURN(const LoadOptions load,
                   ToolLoadOptions(options.model, options.threads, options.weights,
                                   options.activations, options.packed_dir, &clock, &std::cerr));
  ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(options.model, load));
  const ModelConfig& config = model->config();
  RETURN_IF_ERROR(CheckAgainstModel(options, calls, config));

  ThreadPool pool(options.threads);
  LocalExperts experts(&model->experts(), &pool);
  const int64_t blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  ASSIGN_OR_RETURN(const StatePools pools, StatePools::Create(model->state_layout(), 1, blocks));
  ASSIGN_OR_RETURN(const std::unique_ptr<SequenceState> state, SequenceState::Create(pools));
  RETURN_IF_ERROR(state->Reserve(tokens));

  ASSIGN_OR_RETURN(NpyWriter writer, NpyWriter::Create(options.out, {tokens, config.vocab}));
  std::vector<float> logits;
  int64_t done = 0;
  for (const int64_t size : calls) {
    logits.resize(static_cast<size_t>(size * config.vocab));
    SequenceChunk chunk;
    chunk.state = state.get();
    chunk.tokens =
        std::span(options.tokens).subspan(static_cast<size_t>(done), static_cast<size_t>(size));
    chunk.logits = size;
    chunk.out = logits.data();
    RETURN_IF_ERROR(model->Forward({&chunk, 1}, experts, pool));
    RETURN_IF_ERROR(writer.Write(logits));
    done += size;
  }
  RETURN_IF_ERROR(writer.Close());
  return options.states ? WriteStates(config, *state, options.out + ".states") : absl::OkStatus();
}

}  // namespace deltamesh
