// `deltamesh call`: one deltamesh.v1.Inference.Generate over gRPC, as a script or a curious person would make
// it: the request as JSON, the events as JSON, one a line.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct CallOptions {
  std::string router = "127.0.0.1:8081";
  std::string request;   // GenerateRequest, fields named as in inference.proto
  double seconds = 300;  // the call's deadline
};
void AddCallFlags(CLI::App* app, CallOptions* options);

// Prints events as they come. INVALID_ARGUMENT, before any call, when the request is no GenerateRequest;
// else the call's own status.
absl::Status RunCall(const CallOptions& options, std::ostream& out);

}  // namespace deltamesh
