// Turns of conversations through a running mesh, as a client sees them over gRPC: prompts of given token ids.
//
// Thread-safe once Open has returned.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "deltamesh/v1/operations.grpc.pb.h"
#include "runtime/base/ids.h"

namespace deltamesh {

// One answer; times are seconds since its request was sent.
struct SeenTurn {
  double first_token = 0, last_token = 0;
  int64_t prompt_tokens = 0, cached_tokens = 0;
  std::vector<TokenId> answer;
  std::string request_id;
};

class TurnClient {
 public:
  // `router` is a gRPC address; no request may take longer than `longest`.
  TurnClient(std::string router, absl::Duration longest);

  // Asks what is served. UNAVAILABLE when nobody answers.
  absl::Status Open();

  // A greedy answer of exactly `answer` tokens. Not `cached`: nothing is found and nothing kept.
  absl::StatusOr<SeenTurn> Ask(std::span<const TokenId> prompt, int64_t answer,
                               bool cached = true) const;
  // Why that request was placed where it was.
  absl::StatusOr<v1::RequestExplanation> Explain(const std::string& request_id) const;

  int64_t vocab() const { return vocab_; }

 private:
  const std::string router_;
  const absl::Duration longest_;
  std::unique_ptr<v1::Inference::Stub> stub_;
  std::unique_ptr<v1::Operations::Stub> operations_;
  int64_t vocab_ = 0;
};

// The first `tokens` BenchTokens of `sequence`.
std::vector<TokenId> BenchPrompt(uint64_t sequence, int64_t tokens, int64_t vocab);

}  // namespace deltamesh
