// `deltamesh generate`: one answer from an engine in this process, with no mesh. The baseline that a mesh
// must equal, and the fastest way to look at a problem.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/base/ids.h"
#include "runtime/sampling/sampling_params.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct GenerateOptions {
  std::string model;  // checkpoint folder
  // Exactly one input.
  std::optional<std::string> prompt;  // continued as it is
  std::optional<std::string> chat;    // a user's message, rendered with the model's chat format
  std::vector<TokenId> tokens;        // used as they are
  int64_t max_tokens = 128;
  SamplingParams sampling;              // its seed and logit_bias are not used
  std::vector<std::string> logit_bias;  // id=value
  std::optional<uint64_t> seed;         // absent: one is drawn and told
  std::vector<std::string> stops;       // stop strings
  std::vector<TokenId> stop_tokens;     // end after one of these too
  bool ignore_eos = false;              // go on after the model's end tokens
  bool show_tokens = false;             // print token ids instead of text
  int threads = 0;                      // 0: as many as the machine has processors
  std::string weights = "stored";       // width of matrices: stored or 8bit
  std::string activations = "float";    // inputs of narrow matrices: float or int8
  std::string packed_dir = "auto";      // see PackedFolder
  int64_t context_tokens = 8192;        // prompt and answer; never more than the model's
};

void AddGenerateFlags(CLI::App* app, GenerateOptions* options);

// Streams the answer to `out`; progress, timings and warnings go to `notes`. INVALID_ARGUMENT names the
// flag, before the weights are read.
absl::Status RunGenerate(const GenerateOptions& options, std::ostream& out, std::ostream& notes);
// To standard output and standard error.
absl::Status RunGenerate(
    GenerateOptions options);  // without a model: the one that comes with deltamesh

}  // namespace deltamesh
