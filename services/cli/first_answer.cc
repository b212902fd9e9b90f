#include "services/cli/first_answer.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "absl/time/clock.h"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "health/v1/health.grpc.pb.h"
#include "runtime/base/status.h"
#include "services/cli/answer_rate.h"

namespace deltamesh {
namespace {

std::shared_ptr<grpc::Channel> Dial(const std::string& address) {
  return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
}

// A thinking block would use up a short answer; only one family knows the switch.
bool HasThinkingSwitch(v1::Inference::Stub& stub) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::ListModelsResponse response;
  return stub.ListModels(&context, {}, &response).ok() && response.models_size() > 0 &&
         response.models(0).family() == "kimi_k3";
}

}  // namespace

bool IsServing(const std::string& address) {
  auto stub = grpc::health::v1::Health::NewStub(Dial(address));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  return stub->Check(&context, request, &response).ok() &&
         response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

absl::Status StreamFirstAnswer(const std::string& router, const std::string& text,
                               int64_t max_tokens, std::ostream& out,
                               const std::function<bool()>& stop) {
  auto stub = v1::Inference::NewStub(Dial(router));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  v1::GenerateRequest request;
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(text);
  if (HasThinkingSwitch(*stub)) request.mutable_chat()->set_thinking(false);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(static_cast<uint32_t>(max_tokens));

  // Reads block; whoever wants to stop meanwhile cancels the call.
  std::atomic<bool> done = false;
  std::thread watch([&] {
    while (!done) {
      if (stop()) context.TryCancel();
      absl::SleepFor(absl::Milliseconds(100));
    }
  });
  const absl::Time begin = absl::Now();
  absl::Time first = absl::InfiniteFuture();
  v1::Usage usage;
  auto reader = stub->Generate(&context, request);
  for (v1::GenerateEvent event; reader->Read(&event);) {
    if (event.has_delta()) {
      first = std::min(first, absl::Now());
      out << event.delta().text() << std::flush;
    }
    if (event.has_finish()) usage = event.finish().usage();
  }
  const grpc::Status status = reader->Finish();
  done = true;
  watch.join();
  out << "\n";
  if (!status.ok()) {
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }
  const absl::Duration after_first = absl::Now() - first;
  out << absl::StrFormat("(%d prompt tokens, %d answer tokens; first after %.2f s",
                         usage.prompt_tokens(), usage.completion_tokens(),
                         absl::ToDoubleSeconds(first - begin));
  const std::string rate = DescribeAnswerRate(usage.completion_tokens(), after_first);
  if (!rate.empty()) out << ", then " << rate;
  out << ")\n";
  return absl::OkStatus();
}

}  // namespace deltamesh
