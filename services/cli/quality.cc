#include "services/cli/quality.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/expert/local_experts.h"
#include "runtime/model/json_reader.h"
#include "runtime/model/model.h"
#include "runtime/text/tokenizer.h"
#include "services/cli/bench_pools.h"
#include "services/cli/bench_rows.h"
#include "services/cli/load_progress.h"

namespace deltamesh {
namespace {

constexpr int64_t kTextBytesMax = int64_t{64} << 20;
constexpr int64_t kCallTokens = 64;  // logits of this many positions are held at a time

// One model that reads the text.
class Reader {
 public:
  Reader(std::unique_ptr<Model> model, int threads)
      : model_(std::move(model)), pool_(threads), experts_(&model_->experts(), &pool_) {}

  absl::Status Start(int64_t tokens) {
    ASSIGN_OR_RETURN(pools_, BenchPools(model_->state_layout(), 1, tokens));
    ASSIGN_OR_RETURN(state_, SequenceState::Create(pools_));
    return state_->Reserve(tokens);
  }

  absl::StatusOr<std::span<const float>> Read(std::span<const TokenId> tokens) {
    const auto count = static_cast<int64_t>(tokens.size());
    logits_.resize(static_cast<size_t>(count * vocab()));
    SequenceChunk chunk = {.state = state_.get(),
                           .tokens = tokens,
                           .logits = count,
                           .out = logits_.data(),
                           .layer_done = nullptr};
    RETURN_IF_ERROR(model_->Forward({&chunk, 1}, experts_, pool_));
    return std::span<const float>(logits_);
  }

  int64_t vocab() const { return model_->config().vocab; }
  int64_t weight_bytes() const { return model_->weight_bytes(); }

 private:
  std::unique_ptr<Model> model_;
  ThreadPool pool_;
  LocalExperts experts_;
  StatePools pools_;
  std::unique_ptr<SequenceState> state_;
  std::vector<float> logits_;
};

absl::StatusOr<std::unique_ptr<Reader>> Open(const QualityOptions& o, std::string_view weights,
                                             std::string_view activations, int64_t tokens) {
  const SystemClock clock;
  ASSIGN_OR_RETURN(const LoadOptions load, ToolLoadOptions(o.model, o.threads, weights, activations,
                                                           o.packed_dir, &clock, &std::cerr));
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::Load(o.model, load));
  auto reader = std::make_unique<Reader>(std::move(model), o.threads);
  RETURN_IF_ERROR(reader->Start(tokens));
  return reader;
}

// Minus the logarithm of the probability of `token`.
double Surprise(std::span<const float> logits, TokenId token) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float l : logits) sum += std::exp(l - top);
  return std::log(sum) + top - logits[static_cast<size_t>(token)];
}

// Sums over positions.
struct Sums {
  double difference = 0, size = 0, worst = 0;
  int64_t positions = 0, same_top = 0;
  double surprise = 0, stored_surprise = 0;
  int64_t surprises = 0;

  // `next` is the token that follows, -1 at the end.
  void Add(std::span<const float> got, std::span<const float> want, TokenId next) {
    for (size_t i = 0; i < got.size(); ++i) {
      const double d = double{got[i]} - want[i];
      difference += d * d;
      size += double{want[i]} * want[i];
      worst = std::max(worst, std::fabs(d));
    }
    ++positions;
    same_top += std::max_element(got.begin(), got.end()) - got.begin() ==
                std::max_element(want.begin(), want.end()) - want.begin();
    if (next < 0) return;
    surprise += Surprise(got, next);
    stored_surprise += Surprise(want, next);
    ++surprises;
  }
  double error() const { return std::sqrt(difference / std::max(size, 1e-300)); }
  double agreement() const {
    return static_cast<double>(same_top) / std::max<double>(1, positions);
  }
  double Perplexity(double sum) const { return std::exp(sum / std::max<double>(1, surprises)); }
};

}  // namespace

absl::Status RunQuality(const QualityOptions& options, std::ostream& out) {
  if (options.tokens < 2)
    return InvalidArgument("quality-tokens: %d; use at least 2", options.tokens);
  if (options.model.empty()) return InvalidArgument("model: none given; use --model FOLDER");
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(options.text, ignored)) {
    return NotFound("quality: %s is not a file; name a text to read", options.text);
  }
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(options.text, kTextBytesMax));
  ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(options.model));
  ASSIGN_OR_RETURN(std::vector<TokenId> tokens, tokenizer->EncodeOrdinary(text));
  if (std::ssize(tokens) > options.tokens) tokens.resize(static_cast<size_t>(options.tokens));
  const int64_t count = std::ssize(tokens);
  if (count < 2)
    return InvalidArgument("%s: %d tokens are too few to compare", options.text, count);
  ASSIGN_OR_RETURN(const auto stored, Open(options, "stored", "float", count));
  ASSIGN_OR_RETURN(const auto narrow, Open(options, options.weights, options.activations, count));

  Sums sums;
  const auto vocab = static_cast<size_t>(stored->vocab());
  for (int64_t done = 0; done < count; done += kCallTokens) {
    const auto call = std::span<const TokenId>(tokens).subspan(
        static_cast<size_t>(done), static_cast<size_t>(std::min(kCallTokens, count - done)));
    ASSIGN_OR_RETURN(const std::span<const float> want, stored->Read(call));
    ASSIGN_OR_RETURN(const std::span<const float> got, narrow->Read(call));
    for (size_t t = 0; t < call.size(); ++t) {
      const auto at = static_cast<size_t>(done) + t + 1;
      sums.Add(got.subspan(t * vocab, vocab), want.subspan(t * vocab, vocab),
               at < tokens.size() ? tokens[at] : TokenId{-1});
    }
  }
  if (options.json) {
    const nlohmann::ordered_json doc = {
        {"model", options.model},
        {"tokens", count},
        {"weights", options.weights},
        {"activations", options.activations},
        {"weight_bytes", narrow->weight_bytes()},
        {"stored_weight_bytes", stored->weight_bytes()},
        {"logit_relative_rms", sums.error()},
        {"logit_worst", sums.worst},
        {"top1_agreement", sums.agreement()},
        {"perplexity", sums.Perplexity(sums.surprise)},
        {"stored_perplexity", sums.Perplexity(sums.stored_surprise)}};
    out << JsonText(doc);
    return absl::OkStatus();
  }
  out << absl::StrFormat("%d tokens of %s, against weights as stored and float activations\n",
                         count, options.text);
  out << "weights activations      MiB   logit error (RMS)   worst   same top-1   perplexity\n";
  out << absl::StrFormat(
      "stored  float        %8d                                             %10.3f\n",
      stored->weight_bytes() >> 20, sums.Perplexity(sums.stored_surprise));
  out << absl::StrFormat("%-7s %-11s  %8d   %15.3f %%   %5.3f   %8.1f %%   %10.3f\n",
                         options.weights, options.activations, narrow->weight_bytes() >> 20,
                         100 * sums.error(), sums.worst, 100 * sums.agreement(),
                         sums.Perplexity(sums.surprise));
  return absl::OkStatus();
}

}  // namespace deltamesh
