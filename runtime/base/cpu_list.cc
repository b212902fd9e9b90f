#include "runtime/base/cpu_list.h"

#include <sched.h>

#include <set>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "runtime/base/status.h"

namespace deltamesh {

absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text) {
  std::set<int> cpus;
  const auto bad = [&] {
    return InvalidArgument("cpus: \"%s\"; use numbers and ranges below %d, such as 0-3,8", text,
                           CPU_SETSIZE);
  };
  const std::vector<std::string> parts =
      text.empty() ? std::vector<std::string>() : absl::StrSplit(ToAbsl(text), ',');
  for (const std::string& part : parts) {
    const std::vector<std::string> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first || last >= CPU_SETSIZE) {
      return bad();
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.insert(cpu);
  }
  return std::vector<int>(cpus.begin(), cpus.end());
}

absl::Status BindThisThread(std::span<const int> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(static_cast<size_t>(cpu), &set);
  cpu_set_t got;
  CPU_ZERO(&got);
  if (sched_setaffinity(0, sizeof(set), &set) == 0 &&
      sched_getaffinity(0, sizeof(got), &got) == 0) {
    std::vector<int> missing;
    for (const int cpu : cpus) {
      if (!CPU_ISSET(static_cast<size_t>(cpu), &got)) missing.push_back(cpu);
    }
    if (missing.empty()) return absl::OkStatus();
    return InvalidArgument(
        "cpus: %s of %s are not there for this process; see Cpus_allowed_list in /proc/self/status",
        absl::StrJoin(missing, ","), absl::StrJoin(cpus, ","));
  }
  return InvalidArgument(
      "cpus: this process may not run on any of %s; see Cpus_allowed_list in "
      "/proc/self/status",
      absl::StrJoin(cpus, ","));
}

}  // namespace deltamesh
