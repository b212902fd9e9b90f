// The router as a process: owns everything and runs it until a signal.
#pragma once

#include <cstdint>
#include <string>

#include "services/common/http_server.h"
#include "services/router/encode_pool.h"
#include "services/router/front.h"
#include "services/router/router_options.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct RouterFlags {
  FrontOptions front;
  RouterOptions core;
  HttpOptions http_options;
  EncodePoolOptions encode;
  std::string model;
  std::string listen = "127.0.0.1:8081";  // gRPC: clients and workers
  std::string http = "127.0.0.1:8080";    // OpenAI endpoints, /healthz, /readyz, /metrics
  std::string disaggregate = "planned";   // see Disaggregation
  std::string digest;                     // workers must have this model; empty: the first one's
  double drain_seconds = 10;              // longest wait for running answers after SIGTERM
  int64_t waiting_requests = 0;  // of a tenant; 0: as many as `core` says, or all there may be
  double waiting_seconds = 60;
  double ageing_seconds = 5;
  double request_seconds = 3600;
  double heartbeat_seconds = 0.25;
  double lease_seconds = 3;
  int64_t session_mib = 256;
  double store_forget_minutes = absl::ToDoubleMinutes(RouterOptions().store_forget);
  std::string trace_endpoint;  // see SpanExporter; empty: spans go nowhere
  std::string ports_file;
  int64_t parent = 0;
  std::string log_level = "info";
};
void AddRouterFlags(CLI::App* app, RouterFlags* flags);

// Returns the exit code. Call on the main thread before any other thread exists.
int RunRouter(RouterFlags flags);

}  // namespace deltamesh
