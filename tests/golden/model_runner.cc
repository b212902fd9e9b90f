#include "tests/golden/model_runner.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>

#include "runtime/base/status.h"

namespace deltamesh {

namespace {

// Enough for a sequence under test among others.
constexpr int64_t kSlabs = 16;
constexpr int64_t kBlocks = 128;

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  CHECK(value.ok(), "%s", value.status().ToString());
  return *std::move(value);
}

std::shared_ptr<Model> LoadModel(const std::string& folder, const LoadOptions& options) {
  return OrDie(Model::Load(folder, options));
}

}  // namespace

absl::StatusOr<uint64_t> RecordingExperts::Start(const ExpertBatch& batch) {
  for (int64_t i = 0; i < batch.tokens * batch.top_k; ++i) {
    visited_.insert({batch.layer, batch.ids[i]});
  }
  return local_.Start(batch);
}

ModelRunner::ModelRunner(const std::string& folder, int threads, const LoadOptions& options)
    : model_(LoadModel(folder, options)),
      pool_(threads),
      experts_(&model_->experts(), &pool_),
      pools_(OrDie(StatePools::Create(model_->state_layout(), kSlabs, kBlocks))) {}

ModelRunner::ModelRunner(const ModelRunner& other, int threads)
    : model_(other.model_),
      pool_(threads),
      experts_(&model_->experts(), &pool_),
      pools_(OrDie(StatePools::Create(model_->state_layout(), kSlabs, kBlocks))) {}

std::unique_ptr<SequenceState> ModelRunner::NewState(int64_t tokens) const {
  std::unique_ptr<SequenceState> state = OrDie(SequenceState::Create(pools_));
  CHECK_OK(state->Reserve(tokens));
  return state;
}

void ModelRunner::Forward(std::span<SequenceChunk> batch) {
  CHECK_OK(model_->Forward(batch, experts_, pool_));
}

std::vector<float> ModelRunner::Feed(SequenceState& state, std::span<const TokenId> tokens,
                                     const Sizes& sizes) {
  std::vector<float> logits(tokens.size() * static_cast<size_t>(vocab()));
  size_t done = 0;
  for (const int64_t size : sizes) {
    SequenceChunk chunk;
    chunk.state = &state;
    chunk.tokens = tokens.subspan(done, static_cast<size_t>(size));
    chunk.logits = size;
    chunk.out = logits.data() + done * static_cast<size_t>(vocab());
    Forward({&chunk, 1});
    done += static_cast<size_t>(size);
  }
  CHECK(done == tokens.size(), "fed %d of %d tokens", done, tokens.size());
  return logits;
}

Sizes RandomSizes(std::mt19937& random, int64_t tokens, int64_t largest) {
  Sizes sizes;
  while (tokens > 0) {
    const int64_t most = std::min(tokens, largest);
    sizes.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most)));
    tokens -= sizes.back();
  }
  return sizes;
}

Tokens RandomTokens(std::mt19937& random, int64_t count, int64_t vocab) {
  Tokens tokens(static_cast<size_t>(count));
  for (TokenId& t : tokens) t = static_cast<TokenId>(random() % static_cast<uint64_t>(vocab));
  return tokens;
}

std::string Join(const Tokens& tokens) {
  std::string text;
  for (const TokenId t : tokens) {
    if (!text.empty()) text += ',';
    text += std::to_string(t);
  }
  return text;
}

std::vector<float> StateFloats(const SequenceState& state) {
  const StateLayout& l = state.layout();
  const float* slab = state.slab().data();
  std::vector<float> all(slab, slab + l.slab_floats());
  for (int64_t i = 0; i < l.mla_layers; ++i) {
    for (int64_t p = 0; p < state.position(); ++p) {
      const float* row =
          state.block_layer(p / kBlockTokens, i) + p % kBlockTokens * l.latent_width();
      all.insert(all.end(), row, row + l.latent_width());
    }
  }
  return all;
}

double WorstDifference(std::span<const float> a, std::span<const float> b) {
  CHECK(a.size() == b.size(), "%d and %d values", a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(double{a[i]} - double{b[i]});
    if (std::isnan(d)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, d);
  }
  return worst;
}

std::string GoldenFolder(const std::string& name) {
  return std::string(DELTAMESH_SOURCE_DIR "/tests/data/golden/") + name;
}

std::string RunCommand(const std::string& command, int* status) {
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  CHECK(pipe != nullptr, "cannot start: %s", command);
  std::string output;
  char buffer[4096];
  size_t n = 0;
  while ((n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0) output.append(buffer, n);
  const int raw = pclose(pipe);
  *status = WIFEXITED(raw) ? WEXITSTATUS(raw) : -1;
  return output;
}

ScratchFolder::ScratchFolder(const std::string& name)
    : path_(std::string(DELTAMESH_BINARY_DIR "/scratch/") + name + "-" + std::to_string(getpid())) {
  std::filesystem::create_directories(path_);
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace deltamesh
