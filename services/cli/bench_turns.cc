#include "services/cli/bench_turns.h"

#include <utility>

#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "runtime/base/status.h"
#include "services/cli/bench_rows.h"
#include "services/cli/bench_tokens.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kShort = absl::Seconds(10);

absl::Status StatusOf(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace

TurnClient::TurnClient(std::string router, absl::Duration longest)
    : router_(std::move(router)), longest_(longest) {
  const auto channel = grpc::CreateChannel(router_, grpc::InsecureChannelCredentials());
  stub_ = v1::Inference::NewStub(channel);
  operations_ = v1::Operations::NewStub(channel);
}

absl::Status TurnClient::Open() {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kShort));
  v1::ListModelsResponse models;
  const grpc::Status status = stub_->ListModels(&context, {}, &models);
  if (!status.ok()) {
    return Unavailable("router: %s does not answer: %s", router_, status.error_message());
  }
  if (models.models_size() != 1) {
    return FailedPrecondition("router: %s serves %d models; use one that serves one", router_,
                              models.models_size());
  }
  vocab_ = models.models(0).vocab_size();
  return CheckBenchVocab(vocab_);
}

absl::StatusOr<SeenTurn> TurnClient::Ask(std::span<const TokenId> prompt, int64_t answer,
                                         bool cached) const {
  v1::GenerateRequest request;
  request.mutable_tokens()->mutable_ids()->Assign(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(static_cast<uint32_t>(answer));
  request.mutable_stop()->set_ignore_eos(true);
  request.mutable_cache()->set_off(!cached);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + longest_));
  SeenTurn seen;
  const double begin = BenchSeconds();
  const auto reader = stub_->Generate(&context, request);
  for (v1::GenerateEvent event; reader->Read(&event);) {
    const double now = BenchSeconds() - begin;
    seen.request_id = event.request_id();
    if (event.has_finish()) {
      seen.prompt_tokens = event.finish().usage().prompt_tokens();
      seen.cached_tokens = event.finish().usage().cached_tokens();
    }
    if (event.delta().tokens_size() == 0) continue;
    if (seen.answer.empty()) seen.first_token = now;
    seen.last_token = now;
    seen.answer.insert(seen.answer.end(), event.delta().tokens().begin(),
                       event.delta().tokens().end());
  }
  if (const grpc::Status status = reader->Finish(); !status.ok()) return StatusOf(status);
  if (std::ssize(seen.answer) != answer) {
    return Internal("a request for %d tokens got %d", answer, seen.answer.size());
  }
  return seen;
}

absl::StatusOr<v1::RequestExplanation> TurnClient::Explain(const std::string& request_id) const {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kShort));
  v1::ExplainRequest request;
  request.set_request_id(request_id);
  v1::ExplainResponse response;
  const grpc::Status status = operations_->Explain(&context, request, &response);
  if (!status.ok()) return StatusOf(status);
  if (response.requests_size() == 0) return NotFound("request %s: not explained", request_id);
  return response.requests(0);
}

std::vector<TokenId> BenchPrompt(uint64_t sequence, int64_t tokens, int64_t vocab) {
  std::vector<TokenId> prompt;
  prompt.reserve(static_cast<size_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i) {
    prompt.push_back(BenchToken(sequence, static_cast<uint64_t>(i), vocab));
  }
  return prompt;
}

}  // namespace deltamesh
