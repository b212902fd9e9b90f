#include "services/cli/mesh_client.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "runtime/base/status.h"
#include "services/cli/bench_rows.h"
#include "services/cli/bench_tokens.h"

namespace deltamesh {

// When each token of one stream arrived.
struct MeshClient::Stream {
  absl::Status status;
  double begin = 0;
  std::vector<double> tokens;
};

MeshClient::MeshClient(std::string router, absl::Duration longest)
    : router_(std::move(router)),
      longest_(longest),
      stub_(v1::Inference::NewStub(
          grpc::CreateChannel(router_, grpc::InsecureChannelCredentials()))) {}

absl::Status MeshClient::Open() {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::ListModelsResponse models;
  const grpc::Status status = stub_->ListModels(&context, {}, &models);
  if (!status.ok()) {
    return Unavailable("--router: %s does not answer: %s", router_, status.error_message());
  }
  if (models.models_size() != 1) {
    return FailedPrecondition("--router: %s serves %d models; use one that serves one", router_,
                              models.models_size());
  }
  vocab_ = models.models(0).vocab_size();
  return CheckBenchVocab(vocab_);
}

absl::StatusOr<double> MeshClient::Prefill(int64_t tokens, uint64_t sequence) {
  const Stream stream = Generate(tokens, 1, sequence);
  RETURN_IF_ERROR(stream.status);
  return static_cast<double>(tokens) / (stream.tokens.back() - stream.begin);
}

absl::StatusOr<double> MeshClient::Decode(int64_t sequences, int64_t steps, uint64_t sequence) {
  std::vector<Stream> streams(static_cast<size_t>(sequences));
  std::vector<std::thread> threads;
  for (size_t s = 0; s < streams.size(); ++s) {
    threads.emplace_back([&, s] { streams[s] = Generate(1, steps + 1, sequence + s); });
  }
  for (std::thread& thread : threads) thread.join();
  double begin = 0, end = 1e300;
  for (const Stream& stream : streams) {
    RETURN_IF_ERROR(stream.status);
    begin = std::max(begin, stream.tokens.front());
    end = std::min(end, stream.tokens.back());
  }
  int64_t count = 0;
  for (const Stream& stream : streams) {
    count += std::count_if(stream.tokens.begin(), stream.tokens.end(),
                           [&](double t) { return t > begin && t <= end; });
  }
  if (count == 0) {
    return FailedPrecondition("decode-steps: %d; the streams did not run at once, use more steps",
                              steps);
  }
  return static_cast<double>(count) / (end - begin);
}

MeshClient::Stream MeshClient::Generate(int64_t prompt, int64_t answer, uint64_t sequence) const {
  v1::GenerateRequest request;
  for (int64_t i = 0; i < prompt; ++i) {
    request.mutable_tokens()->add_ids(BenchToken(sequence, static_cast<uint64_t>(i), vocab_));
  }
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(static_cast<uint32_t>(answer));
  request.mutable_stop()->set_ignore_eos(true);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + longest_));
  Stream stream;
  stream.begin = BenchSeconds();
  const auto reader = stub_->Generate(&context, request);
  for (v1::GenerateEvent event; reader->Read(&event);) {
    const double now = BenchSeconds();
    stream.tokens.insert(stream.tokens.end(), static_cast<size_t>(event.delta().tokens_size()),
                         now);
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) {
    stream.status =
        absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  } else if (static_cast<int64_t>(stream.tokens.size()) != answer) {
    stream.status = Internal("a request for %d tokens got %d", answer, stream.tokens.size());
  }
  return stream;
}

}  // namespace deltamesh
