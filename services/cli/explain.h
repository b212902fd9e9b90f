// `deltamesh explain`: why a router placed requests where it did, and what happened then.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "deltamesh/v1/operations.pb.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct ExplainOptions {
  std::string router = "127.0.0.1:8081";
  std::string request_id;  // empty: the last ones
  std::string trace_id;    // in place of a request
  uint32_t last = 10;
  bool json = false;
  double seconds = 10;  // the call's deadline
};
void AddExplainFlags(CLI::App* app, ExplainOptions* options);

absl::Status RunExplain(const ExplainOptions& options, std::ostream& out);

// One request as people read it.
std::string DescribeRequest(v1::RequestExplanation request);

}  // namespace deltamesh
