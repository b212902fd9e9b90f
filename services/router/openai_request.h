// JSON bodies in the OpenAI shape to requests. Every error names the field as the client spelt it; fields
// that are not known are ignored, null is absent.
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
