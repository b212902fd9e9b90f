#include "services/simulate/document_traffic.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr uint64_t kCommonText = uint64_t{3} << 60, kDocumentText = uint64_t{4} << 60;
constexpr int64_t kCommonTokens = 600;
constexpr int64_t kNeighbours = 4;  // documents that may follow a document

const Quantiles& DocumentTokens() {
  static const Quantiles q({{0, 1500}, {0.5, 9000}, {0.9, 25000}, {1, 70000}});
  return q;
}
const Quantiles& QuestionTokens() {
  static const Quantiles q({{0, 16}, {0.5, 90}, {0.9, 400}, {1, 1500}});
  return q;
}
const Quantiles& AnswerTokens() {
  static const Quantiles q({{0, 2}, {0.1, 4}, {0.5, 69}, {0.9, 389}, {0.99, 769}, {1, 893}});
  return q;
}

// Of documents that nobody asks about again; beyond those with popularity.
constexpr uint64_t kUniqueDocuments = uint64_t{1} << 40;

// A document's size is its own: the same each time.
int64_t TokensOf(uint64_t document) {
  return static_cast<int64_t>(DocumentTokens().At(SimRandom(7, document).Uniform()));
}

}  // namespace

DocumentTraffic::DocumentTraffic(const DocumentTrafficOptions& options)
    : options_(options), random_(options.seed, 0) {
  CHECK(options.documents >= 1 && options.requests >= 0 && options.requests_per_second > 0);
  double sum = 0;
  for (int64_t rank = 1; rank <= options.documents; ++rank) {
    sum += std::pow(static_cast<double>(rank), -options.skew);
    popularity_.push_back(sum);
  }
  for (double& p : popularity_) p /= sum;
  next_at_ = random_.Exponential(1 / options_.requests_per_second);
}

std::optional<double> DocumentTraffic::NextAt() const {
  if (made_ == options_.requests) return std::nullopt;
  return next_at_;
}

int64_t DocumentTraffic::DrawDocument() {
  const auto at = std::upper_bound(popularity_.begin(), popularity_.end(), random_.Uniform());
  return std::min<int64_t>(at - popularity_.begin(), options_.documents - 1);
}

Turn DocumentTraffic::Next() {
  uint64_t slot = live_.size();
  if (free_.empty()) {
    live_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  live_[slot] = std::make_unique<ContentPath>();
  ContentPath& text = *live_[slot];
  text.Append(kCommonText, kCommonTokens);
  const uint64_t first = options_.unique ? kUniqueDocuments + static_cast<uint64_t>(made_)
                                         : static_cast<uint64_t>(DrawDocument());
  uint64_t document = kDocumentText | first << 16;
  text.Append(document, TokensOf(document));
  for (int more = 0; more < 2 && random_.Uniform() < 0.35; ++more) {
    // Those that follow are few, and the first of them most often.
    const uint64_t which = random_.Below(2) == 0 ? 0 : random_.Below(kNeighbours);
    document = document + (which + 1) * (more == 0 ? 1 : 16);
    text.Append(document, TokensOf(document));
  }
  const uint64_t own = (uint64_t{5} << 60) | static_cast<uint64_t>(made_) << 1;
  text.Append(own, static_cast<int64_t>(QuestionTokens().Draw(random_)));
  Turn turn;
  turn.at = next_at_;
  turn.prompt_tokens = text.tokens();
  turn.output_tokens = static_cast<int64_t>(AnswerTokens().Draw(random_));
  text.Append(own | 1, turn.output_tokens);
  turn.answer_seconds = 2 + static_cast<double>(turn.output_tokens) * 0.02;
  turn.keys = &text.keys();
  turn.source = slot;
  ++made_;
  next_at_ += random_.Exponential(1 / options_.requests_per_second);
  return turn;
}

void DocumentTraffic::Finished(const Turn& turn, double) {
  live_[turn.source].reset();
  free_.push_back(turn.source);
}

}  // namespace deltamesh
