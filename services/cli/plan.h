// `deltamesh plan CONFIG.json`: what a model needs, without having it.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct PlanOptions {
  std::string config;  // empty: Kimi K3
  std::string latents = "f32", state = "f32", conv = "f32";
  std::vector<int64_t> lengths = {8192, 32768, 131072, 1048576};
  int64_t append_tokens = 705;
  int64_t compare_tokens = 32768, kv_heads = 8, window = 4096;
  std::string compare_values = "bf16";
  double memory_gb = 0, link_gb = 25;
  int64_t expert_shards = 0;
  double expert_tflops = 0, expert_read_gb = 0;
  std::string rates;  // a file of measured ones
  double requests = 0, prefill_rate = 0, decode_rate = 0, stream_rate = 0, utilisation = 0.7;
  int64_t input_tokens = 0, uncached_tokens = 0, output_tokens = 0, step_tokens = 512;
  double router_request_ms = 1.4, router_prompt_us = 0.2, router_answer_us = 30;
  int64_t router_live_requests = 1024;
  bool json = false;
};

void AddPlanFlags(CLI::App* app, PlanOptions* options);
absl::Status RunPlan(const PlanOptions& options, std::ostream& out);

}  // namespace deltamesh
