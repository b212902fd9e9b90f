#include "services/decode/step_messages.h"

#include <algorithm>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

mesh::SequenceOutput::End ToEnd(FinishKind kind) {
  switch (kind) {
    case FinishKind::kRunning:
      return mesh::SequenceOutput::RUNNING;
    case FinishKind::kStopToken:
      return mesh::SequenceOutput::STOP_TOKEN;
    case FinishKind::kMaxTokens:
      return mesh::SequenceOutput::MAX_TOKENS;
    case FinishKind::kContextLimit:
      return mesh::SequenceOutput::CONTEXT_LIMIT;
    case FinishKind::kPrefilled:
      break;
  }
  CHECK(false, "a generating sequence ended as a prefill");
}

}  // namespace

SamplingParams ToParams(const mesh::Sampling& from) {
  SamplingParams to;
  to.temperature = from.temperature();
  to.top_p = from.top_p();
  to.top_k = static_cast<int32_t>(from.top_k());
  to.min_p = from.min_p();
  to.repetition_penalty = from.repetition_penalty();
  to.presence_penalty = from.presence_penalty();
  to.frequency_penalty = from.frequency_penalty();
  to.logit_bias.assign(from.logit_bias().begin(), from.logit_bias().end());
  std::sort(to.logit_bias.begin(), to.logit_bias.end());  // a map has no order of its own
  to.seed = from.seed();
  to.logprobs = from.logprobs();
  return to;
}

void FillOutput(const SequenceOutput& from, bool scores, mesh::SequenceOutput* to) {
  to->set_first_index(static_cast<uint64_t>(from.first_index));
  to->set_end(ToEnd(from.finish));
  for (const TokenOutput& token : from.tokens) {
    to->add_tokens(token.token);
    if (!scores) continue;
    mesh::TokenScores* score = to->add_scores();
    score->set_logprob(token.logprob);
    for (const auto& [id, logprob] : token.top) {
      score->add_top_ids(id);
      score->add_top_logprobs(logprob);
    }
  }
}

}  // namespace deltamesh
