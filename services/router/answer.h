// From generated tokens to what a client sees: text deltas, reasoning, tool calls, the finish reason.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "deltamesh/v1/inference.pb.h"
#include "runtime/text/answer_parser.h"
#include "runtime/text/text_stream.h"
#include "services/router/router_core.h"

namespace deltamesh {

// What came since the last event. Tokens may run ahead of their text: a prefix of a stop string and half
// characters are held back.
struct AnswerEvent {
  std::string text;
  std::string reasoning;                   // chat only
  std::vector<AnswerToolCall> tool_calls;  // chat only
  std::vector<TokenId> tokens;
  std::vector<mesh::TokenScores> scores;  // one per token when asked for
  bool ends_with_stop_token = false;      // the last token shows in no text

  bool empty() const {
    return text.empty() && reasoning.empty() && tool_calls.empty() && tokens.empty();
  }
};

struct AnswerEnd {
  v1::FinishReason reason = v1::FINISH_REASON_UNSPECIFIED;
  TokenUsage usage;
  uint64_t seed = 0;
  std::string stop_string;     // the one that matched, if any
  int64_t session_tokens = 0;  // of the session after this turn; 0: nobody's, or overtaken
};

// Where an answer goes. Called on the router's thread, one call at a time; must not block. Any number of
// OnEvent, then exactly one OnEnd or OnError, unless the request is cancelled before.
class AnswerSink {
 public:
  virtual ~AnswerSink() = default;
  virtual void OnEvent(AnswerEvent event) = 0;
  virtual void OnEnd(AnswerEnd end) = 0;
  virtual void OnError(const absl::Status& status) = 0;
};

// One answer, one thread.
class AnswerStream {
 public:
  // `parser` is null for plain text. `tokenizer` outlives this. INVALID_ARGUMENT names a bad stop string.
  static absl::StatusOr<std::unique_ptr<AnswerStream>> Create(const Tokenizer& tokenizer,
                                                              std::unique_ptr<AnswerParser> parser,
                                                              std::vector<std::string> stops,
                                                              uint64_t seed);

  // Takes tokens up to a stop string's match; what follows it is dropped.
  AnswerEvent Push(const mesh::SequenceOutput& output);
  // A stop string matched: the answer is complete, the sequence can be cancelled.
  bool stopped() const;
  // What was held back; after the last Push of an answer that was not stopped.
  AnswerEvent Flush();
  // `end` is ignored when a stop string matched.
  AnswerEnd End(mesh::SequenceOutput::End end, TokenUsage usage) const;
  int64_t tokens_taken() const { return taken_; }

 private:
  AnswerStream(std::unique_ptr<AnswerParser> parser, uint64_t seed)
      : parser_(std::move(parser)), seed_(seed) {}
  void Add(AnswerDelta delta, AnswerEvent* event);

  const std::unique_ptr<AnswerParser> parser_;
  const uint64_t seed_;
  std::optional<TextStream> text_;  // plain text
  StopFilter filter_;               // chat: over the content
  int64_t taken_ = 0;
};

}  // namespace deltamesh
