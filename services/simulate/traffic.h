// Requests that come to a simulated mesh, in order of time.
//
// Open or closed: a session's next turn comes when its last answer is finished and the client has thought,
// so how fast answers come decides when prompts do. One call at a time; not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "runtime/prefix/prefix_key.h"

namespace deltamesh {

struct Turn {
  double at = 0;              // seconds since the beginning
  uint64_t session = 0;       // 0: none
  int64_t prompt_tokens = 0;  // at least 1
  int64_t output_tokens = 0;  // at least 1
  double answer_seconds =
      0;  // how long it took where the traffic was seen, for runs without workers
  std::vector<int64_t> breakpoints;  // tokens up to which the client expects reuse
  // Names of the blocks of prompt and answer. Stays in place until the turn is finished.
  const std::vector<PrefixKey>* keys = nullptr;
  uint64_t source = 0;  // the traffic's own

  // Blocks that a state may stand at when the prompt is computed: a token is left to compute.
  int64_t prompt_blocks() const { return (prompt_tokens - 1) / kPrefixBlockTokens; }
  // The same at the end of the answer, whose last token was never an input.
  int64_t answer_blocks() const { return (prompt_tokens + output_tokens - 1) / kPrefixBlockTokens; }
};

class Traffic {
 public:
  virtual ~Traffic() = default;
  // When the next turn comes, as far as is known: answers that finish may bring earlier ones. Nothing: only
  // finished answers bring more.
  virtual std::optional<double> NextAt() const = 0;
  // The turn of NextAt.
  virtual Turn Next() = 0;
  virtual void Finished(const Turn& turn, double now) = 0;
  // Why there was no more, where that is an error.
  virtual absl::Status status() const { return absl::OkStatus(); }
};

}  // namespace deltamesh
