#include "services/router/output_check.h"

#include <cmath>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

absl::Status CheckToken(int64_t token, int64_t vocab) {
  if (token >= 0 && (vocab == 0 || token < vocab)) return absl::OkStatus();
  return Internal("token %d is outside the vocabulary of %d", token, vocab);
}

absl::Status CheckScores(const mesh::TokenScores& scores, const OutputLimits& limits) {
  if (scores.top_ids_size() != scores.top_logprobs_size() ||
      scores.top_ids_size() > limits.logprobs) {
    return Internal("a token has %d alternatives with %d scores, %d were asked for",
                    scores.top_ids_size(), scores.top_logprobs_size(), limits.logprobs);
  }
  bool finite = std::isfinite(scores.logprob());
  for (const float score : scores.top_logprobs()) finite &= std::isfinite(score);
  if (!finite) return Internal("a score is not a finite number");
  for (const int32_t token : scores.top_ids()) RETURN_IF_ERROR(CheckToken(token, limits.vocab));
  return absl::OkStatus();
}

absl::Status CheckEnd(const mesh::SequenceOutput& output, int64_t reached,
                      const OutputLimits& limits) {
  if (!mesh::SequenceOutput::End_IsValid(output.end())) {
    return Internal("end %d is not known", static_cast<int>(output.end()));
  }
  if (output.end() != mesh::SequenceOutput::RUNNING && reached < limits.delivered) {
    return Internal("the answer ends at %d tokens, %d were sent before", reached, limits.delivered);
  }
  if (output.end() == mesh::SequenceOutput::MAX_TOKENS && reached != limits.max_tokens) {
    return Internal("MAX_TOKENS after %d of %d tokens", reached, limits.max_tokens);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckOutput(const mesh::SequenceOutput& output, const OutputLimits& limits) {
  const int64_t count = output.tokens_size();
  const int64_t scores = output.scores_size();
  // The index is compared unsigned: beyond the first test it is small, and sums cannot overflow.
  const bool gap = output.first_index() > static_cast<uint64_t>(limits.delivered);
  const int64_t reached = gap ? 0 : static_cast<int64_t>(output.first_index()) + count;
  const bool scored = scores == 0 || (scores == count && limits.logprobs >= 0);
  if (gap || reached > limits.max_tokens || !scored) {
    return Internal("%d tokens from index %d with %d scores after %d of %d", count,
                    output.first_index(), scores, limits.delivered, limits.max_tokens);
  }
  RETURN_IF_ERROR(CheckEnd(output, reached, limits));
  for (const int32_t token : output.tokens()) RETURN_IF_ERROR(CheckToken(token, limits.vocab));
  for (const mesh::TokenScores& s : output.scores()) RETURN_IF_ERROR(CheckScores(s, limits));
  return absl::OkStatus();
}

}  // namespace deltamesh
