#include "runtime/base/status.h"

#include <cstdio>
#include <cstdlib>

namespace deltamesh {

absl::Status Annotate(const absl::Status& status, std::string_view prefix) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrFormat("%s: %s", prefix, std::string(status.message())));
}

void CheckFailed(const char* file, int line, const char* condition, const std::string& detail) {
  std::fprintf(stderr, "CHECK failed at %s:%d: %s %s\n", file, line, condition, detail.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace deltamesh
