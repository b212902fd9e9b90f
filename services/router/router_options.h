// Every bound and period of the router's logic, in one place. Printed at start.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/mesh.pb.h"

namespace deltamesh {

// Attempt numbers set aside for one StartDecode: its first grant and those after refused hand-offs.
inline constexpr uint32_t kAttemptsPerPlacement = 16;

// Longer than the longest pause before a worker dials a router again.
inline constexpr absl::Duration kRedialMax = absl::Seconds(5);

// Whether prompts are computed by prefill workers and handed over.
enum class Disaggregation {
  kPlanned,  // where the estimate is least, request by request
  kAlways,   // whenever a prefill worker can
  kNever,    // by the decode worker itself
};
std::string_view DisaggregationName(Disaggregation how);
std::optional<Disaggregation> DisaggregationNamed(std::string_view name);

struct RouterOptions {
  std::string name = "router";
  // Larger after each restart (nanoseconds of the start time will do): the views sent to workers
  // count up from here, and a view with a smaller number is ignored by them.
  uint64_t epoch = 1;

  // What registrants must equal. Empty and zero fields are learned from the first registrant and
  // fixed from then on; the protocol is always this build's own.
  mesh::ModelIdentity identity;

  // Token ids that workers send must be below; 0: not known, any id passes.
  int64_t vocab = 0;

  // Requests.
  int64_t live_requests_max = 1024;              // admitted and not ended, waiting ones included
  int64_t waiting_requests_max = 256;            // of one tenant: no worker has room yet
  int64_t waiting_tokens_max = 16 << 20;         // of one tenant: what these cost (fair_queue.h)
  int64_t turn_tokens = 8192;                    // a tenant's share of one round
  absl::Duration ageing_max = absl::Seconds(5);  // a request is passed by cheaper ones for
  int64_t prompt_tokens_max = 1 << 20;
  absl::Duration waiting_max = absl::Seconds(60);  // then RESOURCE_EXHAUSTED
  absl::Duration request_max = absl::Hours(1);     // longest deadline a request may have
  int64_t handoff_attempts_max = 3;
  Disaggregation disaggregation = Disaggregation::kPlanned;
  // Prefill and decode workers compute on the same processors: answers wait for prompts wherever those
  // compute.
  bool shared_processors = false;
  absl::Duration landing_max = absl::Seconds(10);  // decode must grant a landing within
  absl::Duration progress_max =
      absl::Minutes(10);  // between a grant, the hand-off, and each output
  // A prefill worker that gives up may only have seen the refusal first: the decode worker's own
  // report, which names the reason and keeps the landing's room, is awaited this long.
  absl::Duration verdict_wait = absl::Milliseconds(500);

  // Sessions.
  int64_t sessions_max = 65536;  // remembered
  int64_t session_bytes_max = int64_t{256} << 20;
  int64_t session_calls_max = 128;                      // that wait at once; of a tenant half
  absl::Duration session_read_max = absl::Seconds(5);   // all stores have answered within
  absl::Duration session_call_max = absl::Seconds(60);  // longest deadline of a call
  // A worker with a store that is away for this long counts as gone: it may have loaded a model meanwhile.
  absl::Duration store_forget = absl::Hours(1);
  int64_t decisions_max = 1024;  // requests whose placement can be explained afterwards

  // Workers.
  int64_t links_max = 1024;
  absl::Duration register_max = absl::Seconds(5);  // a link must register within
  absl::Duration heartbeat = absl::Milliseconds(250);
  absl::Duration lease = absl::Seconds(3);  // a worker silent for this long is lost

  // Relations between the fields hold and every bound is positive.
  absl::Status Validate() const;
  // (name, value) of every field, in declaration order, for the log line at start.
  std::vector<std::pair<std::string, std::string>> Describe() const;
};

}  // namespace deltamesh
