#include "runtime/cache/available_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

// The number after the word `key` in a file of "key number" lines.
std::optional<int64_t> Field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  for (std::string line; file >> word; std::getline(file, line)) {
    if (word == key && file >> value) return value;
    file.clear();
  }
  return std::nullopt;
}

std::optional<int64_t> Number(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;  // "max" is no number and no limit
  return std::nullopt;
}

// The process's group: the path after "0::".
std::string GroupPath(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("0::")) return line.substr(3);
  }
  return "";
}

std::optional<int64_t> LeftInGroup(const std::string& folder) {
  const std::optional<int64_t> limit = Number(folder + "/memory.max");
  const std::optional<int64_t> used = Number(folder + "/memory.current");
  if (!limit || !used) return std::nullopt;
  const int64_t cache = Field(folder + "/memory.stat", "file").value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *used - cache));
}

}  // namespace

absl::StatusOr<int64_t> AvailableMemory(const std::string& root) {
  const std::optional<int64_t> kib = Field(root + "/proc/meminfo", "MemAvailable:");
  if (!kib) return NotFound("/proc/meminfo: tells no MemAvailable");
  int64_t available = *kib * 1024;
  // A limit may sit on the group or on any group above it.
  for (std::string group = GroupPath(root);; group.resize(group.rfind('/'))) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    if (const auto left = LeftInGroup(root + "/sys/fs/cgroup" + group)) {
      available = std::min(available, *left);
    }
    if (group.find('/') == std::string::npos) break;
  }
  return available;
}

}  // namespace deltamesh
