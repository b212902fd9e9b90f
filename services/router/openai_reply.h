// Answers in the OpenAI shape: whole replies, stream chunks, errors.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/text/json.h"
#include "runtime/text/tokenizer.h"
#include "services/common/http_server.h"
#include "services/router/answer.h"

namespace deltamesh {

// {"error": {message, type, param, code}} with the HTTP status of the code; 429 and 503 say when to come
// back. `param` is the field that the message starts with.
HttpResponse ErrorReply(const absl::Status& status);
Json ErrorJson(const absl::Status& status);
int HttpStatusOf(absl::StatusCode code);

Json UsageJson(const TokenUsage& usage);
std::string FinishReasonName(v1::FinishReason reason);

// The log-probabilities of an answer so far, in either shape.
class LogprobsWriter {
 public:
  LogprobsWriter(const Tokenizer* tokenizer, bool chat) : tokenizer_(tokenizer), chat_(chat) {}
  // Takes the event's tokens, without a stop token.
  void Add(const AnswerEvent& event);
  // What was added since the last call; null when that is nothing.
  Json Take();

 private:
  Json ChatEntry(TokenId token, float logprob) const;

  const Tokenizer* const tokenizer_;
  const bool chat_;
  Json pending_;
  int64_t text_offset_ = 0;  // characters before the next token
};

// Makes the pieces of one reply.
class ReplyWriter {
 public:
  struct Options {
    std::string id;  // "chatcmpl-..." or "cmpl-..."
    std::string model;
    int64_t created = 0;  // seconds since 1970
    bool chat = false;
    bool logprobs = false;
    bool include_usage = false;
  };
  ReplyWriter(Options options, const Tokenizer* tokenizer);

  // Streaming: the data of each chunk, in order, without framing.
  std::vector<std::string> Chunks(AnswerEvent event);
  std::vector<std::string> LastChunks(const AnswerEnd& end);

  // Not streaming: everything at the end.
  void Collect(AnswerEvent event);
  std::string Whole(const AnswerEnd& end);

 private:
  // Around the text of a chunk that says nothing else; made once, for it is the same for every token.
  struct Frame {
    std::string before, after;

    bool known() const { return !before.empty(); }
    std::string Around(const std::string& text) const;
  };

  Json Head(const char* object) const;
  std::string TextChunk(const std::string& text);
  Json Chunk(Json choice) const;
  static Json ToolCalls(const std::vector<AnswerToolCall>& calls, bool with_index);

  const Options options_;
  LogprobsWriter logprobs_;
  bool role_sent_ = false;
  Frame text_frame_;
  AnswerEvent all_;
};

}  // namespace deltamesh
