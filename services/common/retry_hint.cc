#include "services/common/retry_hint.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "absl/strings/cord.h"

namespace deltamesh {
namespace {

constexpr char kPayload[] = "deltamesh.retry-after-ms";

int64_t CeilTo(absl::Duration after, absl::Duration unit) {
  return absl::ToInt64Milliseconds(absl::Ceil(after, unit));
}

}  // namespace

absl::Status WithRetryAfter(absl::Status status, absl::Duration after) {
  status.SetPayload(kPayload, absl::Cord(std::to_string(CeilTo(after, absl::Milliseconds(1)))));
  return status;
}

std::optional<absl::Duration> RetryAfterOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  if (!payload) return std::nullopt;
  const std::string text(*payload);
  int64_t ms = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), ms).ec != std::errc()) {
    return std::nullopt;
  }
  return absl::Milliseconds(ms);
}

int64_t RetrySeconds(absl::Duration after) {
  return std::max<int64_t>(1, CeilTo(after, absl::Seconds(1)) / 1000);
}

}  // namespace deltamesh
