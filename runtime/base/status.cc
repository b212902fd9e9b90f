#include "runtime/base/status.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/cord.h"

namespace deltamesh {

absl::Status Annotate(const absl::Status& status, std::string_view prefix) {
  if (status.ok()) return status;
  absl::Status out(status.code(), absl::StrFormat("%s: %s", prefix, std::string(status.message())));
  status.ForEachPayload(
      [&out](absl::string_view type, const absl::Cord& payload) { out.SetPayload(type, payload); });
  return out;
}

void CheckFailed(const char* file, int line, const char* condition, const std::string& detail) {
  std::fprintf(stderr, "CHECK failed at %s:%d: %s %s\n", file, line, condition, detail.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace deltamesh
