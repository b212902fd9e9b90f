// JSON bodies in the OpenAI shape to requests. Every error names the field as the client spelt it; fields
// that are not known are ignored, null is absent.
//
// Beside OpenAI's fields these are read:
//   top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos: as in SamplingOptions and StopOptions of
//     proto/deltamesh/v1/inference.proto.
//   thinking, chat_template_kwargs.thinking or .enable_thinking: whether the model thinks before it answers.
//   cache_salt: the tenant's name; only under the same one are prompts found again, and sessions.
//   cache_control: {"type": "ephemeral"} on a message or on a text part of its content: others are likely to
//     begin like this prompt up to there, so its state is kept for them; at most 16 places. The end of tools
//     and system messages is one without saying so. A prompt of which nothing is known keeps two of them, the
//     shallowest; the next ones that begin alike keep more.
//   cache_breakpoints: the same as counts of the prompt's leading tokens, for those who know them.
//   session: names the conversation (1 to 256 bytes), so that it can go on by name, over gRPC too; see
//     SessionInfo. The answer carries session_tokens, streams in the chunk with the finish_reason. Who knows
//     the name and the salt can go on with the conversation.
//   append_to_session: true: messages or prompt hold only what is new and follow the session; tools and
//     reasoning_effort belong to its beginning and are refused. 404 when there is no such session: send its
//     first turn without this. 503 with retry-after while another turn of it runs.
//   session_tokens: with append_to_session: refused with 400 unless the session has exactly so many tokens.
#pragma once

#include "absl/status/statusor.h"
#include "runtime/text/json.h"
#include "services/router/front.h"

namespace deltamesh {

struct OpenAiRequest {
  GenerateSpec spec;
  bool chat = false;
  bool stream = false;
  bool include_usage = false;  // streaming: one more chunk with the usage
};

// The legacy endpoint answers with this many tokens when max_tokens is absent.
inline constexpr int64_t kCompletionTokensDefault = 16;

absl::StatusOr<OpenAiRequest> ParseChatCompletion(const Json& body);
absl::StatusOr<OpenAiRequest> ParseCompletion(const Json& body);

}  // namespace deltamesh
