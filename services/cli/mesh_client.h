// Tokens per second through a running mesh, as a client sees them over gRPC.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "deltamesh/v1/inference.grpc.pb.h"

namespace deltamesh {

class MeshClient {
 public:
  // `router` is a gRPC address; no request may take longer than `longest`.
  MeshClient(std::string router, absl::Duration longest);

  // Asks what is served. UNAVAILABLE when nobody answers.
  absl::Status Open();

  // From sending a prompt of BenchTokens of `sequence` to the first token after it.
  absl::StatusOr<double> Prefill(int64_t tokens, uint64_t sequence);
  // Streams of `steps` tokens and one more, after a prompt of one token each: the rate while all streams run,
  // from the last one's first token to the first one's last. The first stream is of `sequence`.
  absl::StatusOr<double> Decode(int64_t sequences, int64_t steps, uint64_t sequence);

 private:
  struct Stream;
  Stream Generate(int64_t prompt, int64_t answer, uint64_t sequence) const;

  const std::string router_;
  const absl::Duration longest_;
  std::unique_ptr<v1::Inference::Stub> stub_;
  int64_t vocab_ = 0;
};

}  // namespace deltamesh
