#include "services/router/answer.h"

#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

absl::StatusOr<std::unique_ptr<AnswerStream>> AnswerStream::Create(
    const Tokenizer& tokenizer, std::unique_ptr<AnswerParser> parser,
    std::vector<std::string> stops, uint64_t seed) {
  std::unique_ptr<AnswerStream> stream(new AnswerStream(std::move(parser), seed));
  if (stream->parser_ != nullptr) {
    ASSIGN_OR_RETURN(stream->filter_, StopFilter::Create(std::move(stops)));
  } else {
    ASSIGN_OR_RETURN(stream->text_, TextStream::Create(tokenizer, {.stops = std::move(stops),
                                                                   .show_special = false}));
  }
  return stream;
}

bool AnswerStream::stopped() const { return text_ ? text_->stopped() : filter_.stopped(); }

void AnswerStream::Add(AnswerDelta delta, AnswerEvent* event) {
  // Once the content was cut nothing after it belongs to the answer.
  if (filter_.stopped()) return;
  event->reasoning += delta.reasoning;
  event->text += filter_.Push(delta.content);
  if (filter_.stopped()) return;
  for (AnswerToolCall& call : delta.tool_calls) event->tool_calls.push_back(std::move(call));
}

AnswerEvent AnswerStream::Push(const mesh::SequenceOutput& output) {
  AnswerEvent event;
  for (int i = 0; i < output.tokens_size() && !stopped(); ++i) {
    const TokenId token = output.tokens(i);
    event.tokens.push_back(token);
    if (output.scores_size() > 0) event.scores.push_back(output.scores(i));
    ++taken_;
    const bool last = i + 1 == output.tokens_size();
    if (last && output.end() == mesh::SequenceOutput::STOP_TOKEN) {
      event.ends_with_stop_token = true;
    } else if (text_) {
      event.text += text_->Push({&token, 1});
    } else {
      Add(parser_->Push({&token, 1}), &event);
    }
  }
  return event;
}

AnswerEvent AnswerStream::Flush() {
  AnswerEvent event;
  if (stopped()) return event;
  if (text_) {
    event.text = text_->Finish();
  } else {
    Add(parser_->Finish(), &event);
    if (!filter_.stopped()) event.text += filter_.Finish();
  }
  return event;
}

AnswerEnd AnswerStream::End(mesh::SequenceOutput::End end, TokenUsage usage) const {
  AnswerEnd out;
  out.usage = usage;
  out.usage.completion_tokens = taken_;
  out.seed = seed_;
  if (stopped()) {
    out.reason = v1::FINISH_REASON_STOP;
    out.stop_string = text_ ? text_->stop_string() : filter_.stop_string();
  } else if (end == mesh::SequenceOutput::STOP_TOKEN) {
    const bool called = parser_ != nullptr && parser_->tool_call_count() > 0;
    out.reason = called ? v1::FINISH_REASON_TOOL_CALLS : v1::FINISH_REASON_STOP;
  } else {
    out.reason = v1::FINISH_REASON_LENGTH;
  }
  return out;
}

}  // namespace deltamesh
