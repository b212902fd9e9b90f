#include "services/router/router_options.h"

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr std::pair<Disaggregation, std::string_view> kDisaggregations[] = {
    {Disaggregation::kPlanned, "planned"},
    {Disaggregation::kAlways, "always"},
    {Disaggregation::kNever, "never"}};

}  // namespace

std::string_view DisaggregationName(Disaggregation how) {
  for (const auto& [value, name] : kDisaggregations) {
    if (value == how) return name;
  }
  return "";
}

std::optional<Disaggregation> DisaggregationNamed(std::string_view name) {
  for (const auto& [value, known] : kDisaggregations) {
    if (known == name) return value;
  }
  return std::nullopt;
}

absl::Status RouterOptions::Validate() const {
  const auto positive = [](const char* name, int64_t value) {
    return value > 0 ? absl::OkStatus()
                     : InvalidArgument("%s: %d; use a positive number", name, value);
  };
  const auto lasting = [](const char* name, absl::Duration value) {
    return value > absl::ZeroDuration() ? absl::OkStatus()
                                        : InvalidArgument("%s: %s; use a positive duration", name,
                                                          absl::FormatDuration(value));
  };
  if (vocab < 0) return InvalidArgument("vocab: %d; use 0 or the vocabulary's size", vocab);
  if (name.empty()) return InvalidArgument("name: empty; give the router a name");
  RETURN_IF_ERROR(positive("live_requests_max", live_requests_max));
  RETURN_IF_ERROR(positive("waiting_requests_max", waiting_requests_max));
  RETURN_IF_ERROR(positive("waiting_tokens_max", waiting_tokens_max));
  RETURN_IF_ERROR(positive("turn_tokens", turn_tokens));
  RETURN_IF_ERROR(lasting("ageing_max", ageing_max));
  RETURN_IF_ERROR(positive("prompt_tokens_max", prompt_tokens_max));
  RETURN_IF_ERROR(lasting("waiting_max", waiting_max));
  RETURN_IF_ERROR(lasting("request_max", request_max));
  RETURN_IF_ERROR(positive("handoff_attempts_max", handoff_attempts_max));
  RETURN_IF_ERROR(lasting("landing_max", landing_max));
  RETURN_IF_ERROR(lasting("progress_max", progress_max));
  RETURN_IF_ERROR(lasting("verdict_wait", verdict_wait));
  RETURN_IF_ERROR(positive("sessions_max", sessions_max));
  RETURN_IF_ERROR(positive("session_bytes_max", session_bytes_max));
  RETURN_IF_ERROR(positive("session_calls_max", session_calls_max));
  RETURN_IF_ERROR(lasting("session_read_max", session_read_max));
  RETURN_IF_ERROR(lasting("session_call_max", session_call_max));
  if (store_forget < kRedialMax) {
    return InvalidArgument("store_forget: %s; use at least %s, in which workers come back",
                           absl::FormatDuration(store_forget), absl::FormatDuration(kRedialMax));
  }
  RETURN_IF_ERROR(positive("decisions_max", decisions_max));
  RETURN_IF_ERROR(positive("links_max", links_max));
  RETURN_IF_ERROR(lasting("register_max", register_max));
  RETURN_IF_ERROR(lasting("heartbeat", heartbeat));
  RETURN_IF_ERROR(lasting("lease", lease));
  if (heartbeat < absl::Milliseconds(1)) {
    return InvalidArgument("heartbeat: %s; use at least 1ms", absl::FormatDuration(heartbeat));
  }
  if (lease < 3 * heartbeat) {
    return InvalidArgument(
        "lease: %s is shorter than three heartbeats of %s; a late one would end it",
        absl::FormatDuration(lease), absl::FormatDuration(heartbeat));
  }
  if (handoff_attempts_max > int64_t{kAttemptsPerPlacement}) {
    return InvalidArgument("handoff_attempts_max: %d; use at most %d, what one placement has",
                           handoff_attempts_max, kAttemptsPerPlacement);
  }
  if (waiting_requests_max > live_requests_max) {
    return InvalidArgument("waiting_requests_max: %d is above live_requests_max, %d",
                           waiting_requests_max, live_requests_max);
  }
  return absl::OkStatus();
}

std::vector<std::pair<std::string, std::string>> RouterOptions::Describe() const {
  const auto number = [](int64_t v) { return std::to_string(v); };
  const auto time = [](absl::Duration d) { return absl::FormatDuration(d); };
  return {{"name", name},
          {"epoch", std::to_string(epoch)},
          {"digest", identity.digest().empty() ? "learned" : identity.digest()},
          {"vocab", vocab == 0 ? "unknown" : number(vocab)},
          {"text_digest", identity.text_digest().empty() ? "learned" : identity.text_digest()},
          {"live_requests_max", number(live_requests_max)},
          {"waiting_requests_max", number(waiting_requests_max)},
          {"waiting_tokens_max", number(waiting_tokens_max)},
          {"turn_tokens", number(turn_tokens)},
          {"ageing_max", time(ageing_max)},
          {"prompt_tokens_max", number(prompt_tokens_max)},
          {"waiting_max", time(waiting_max)},
          {"request_max", time(request_max)},
          {"handoff_attempts_max", number(handoff_attempts_max)},
          {"disaggregation", std::string(DisaggregationName(disaggregation))},
          {"shared_processors", shared_processors ? "yes" : "no"},
          {"landing_max", time(landing_max)},
          {"progress_max", time(progress_max)},
          {"verdict_wait", time(verdict_wait)},
          {"sessions_max", number(sessions_max)},
          {"session_bytes_max", number(session_bytes_max)},
          {"session_calls_max", number(session_calls_max)},
          {"session_read_max", time(session_read_max)},
          {"session_call_max", time(session_call_max)},
          {"store_forget", time(store_forget)},
          {"decisions_max", number(decisions_max)},
          {"links_max", number(links_max)},
          {"register_max", time(register_max)},
          {"heartbeat", time(heartbeat)},
          {"lease", time(lease)}};
}

}  // namespace deltamesh
