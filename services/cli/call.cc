#include "services/cli/call.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "runtime/base/status.h"
#include "services/cli/terminal_text.h"
#include "services/common/flag_range.h"

namespace deltamesh {
namespace {

namespace json = google::protobuf::util;

absl::StatusOr<v1::GenerateRequest> ParseRequest(const std::string& text) {
  v1::GenerateRequest request;
  const auto parsed = json::JsonStringToMessage(text, &request);
  if (parsed.ok()) return request;
  return InvalidArgument(
      "request: is no GenerateRequest in JSON: %s; see proto/deltamesh/v1/inference.proto, or try "
      "{\"text\": \"Once\"}",
      parsed.message().ToString());
}

}  // namespace

void AddCallFlags(CLI::App* app, CallOptions* o) {
  app->add_option("request", o->request,
                  "deltamesh.v1.GenerateRequest as JSON: '{\"text\": \"Once\", \"stop\": "
                  "{\"max_tokens\": 16}}'")
      ->required();
  app->add_option("--router", o->router, "host:port of the router's gRPC port")
      ->envname("DELTAMESH_ROUTER")
      ->capture_default_str();
  app->add_option("--seconds", o->seconds, "longest wait for the whole answer")
      ->check(NumberIn(1e-3, 1e6, "seconds"))
      ->capture_default_str();
}

absl::Status RunCall(const CallOptions& options, std::ostream& out) {
  ASSIGN_OR_RETURN(const v1::GenerateRequest request, ParseRequest(options.request));
  const auto stub = v1::Inference::NewStub(
      grpc::CreateChannel(options.router, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(options.seconds)));
  json::JsonPrintOptions print;
  print.preserve_proto_field_names = true;
  const auto reader = stub->Generate(&context, request);
  for (v1::GenerateEvent event; reader->Read(&event);) {
    std::string line;
    // Text that ends within a character cannot be shown as JSON; every other event can.
    if (json::MessageToJsonString(event, &line, print).ok()) out << line << "\n" << std::flush;
  }
  const grpc::Status status = reader->Finish();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      ForTerminal(status.error_message()));
}

}  // namespace deltamesh
