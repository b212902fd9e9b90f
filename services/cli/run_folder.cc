#include "services/cli/run_folder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "deltamesh-run-";
constexpr size_t kRandom = 6;

// The process whose folder has that name; 0: it is none.
pid_t OwnerOf(std::string_view name) {
  if (!name.starts_with(kPrefix)) return 0;
  name.remove_prefix(kPrefix.size());
  const size_t dash = name.find('-');
  int pid = 0;
  if (dash == std::string_view::npos || name.size() != dash + 1 + kRandom) return 0;
  return absl::SimpleAtoi(ToAbsl(name.substr(0, dash)), &pid) && pid > 0 ? pid : 0;
}

bool IsThere(pid_t pid) { return kill(pid, 0) == 0 || errno != ESRCH; }

// Locked, so that it is this process's to remove; -1: it is not.
int ClaimAbandoned(const fs::path& folder, absl::Time now) {
  const pid_t owner = OwnerOf(folder.filename().string());
  if (owner == 0 || IsThere(owner)) return -1;
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return -1;
  struct stat info {};
  if (fstat(fd, &info) == 0 && info.st_uid == geteuid() &&
      absl::TimeFromTimespec(info.st_mtim) + RunFolder::kYoung <= now &&
      flock(fd, LOCK_EX | LOCK_NB) == 0) {
    return fd;
  }
  close(fd);
  return -1;
}

}  // namespace

int RunFolder::RemoveAbandoned(const std::string& parent, absl::Time now) {
  std::error_code error;
  int looked_at = 0, removed = 0;
  fs::directory_iterator entry(parent, fs::directory_options::skip_permission_denied, error);
  for (; !error && entry != fs::directory_iterator() && ++looked_at <= kLookedAtMax &&
         removed < kRemovedMax;
       entry.increment(error)) {
    const int lock = ClaimAbandoned(entry->path(), now);
    if (lock < 0) continue;
    std::error_code failed;
    fs::remove_all(entry->path(), failed);
    if (!failed) ++removed;
    close(lock);
  }
  return removed;
}

absl::StatusOr<std::unique_ptr<RunFolder>> RunFolder::Create() {
  std::error_code error;
  const fs::path parent = fs::temp_directory_path(error);
  if (!error) RemoveAbandoned(parent.string(), absl::Now());
  std::string path =
      (parent / (std::string(kPrefix) + std::to_string(getpid()) + "-" + std::string(kRandom, 'X')))
          .string();
  if (error || mkdtemp(path.data()) == nullptr) {
    return Unavailable("%s: cannot be created; set TMPDIR to a folder that can be written", path);
  }
  const int lock = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock >= 0) flock(lock, LOCK_EX | LOCK_NB);
  return std::unique_ptr<RunFolder>(new RunFolder(std::move(path), lock));
}

RunFolder::~RunFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  if (lock_ >= 0) close(lock_);
}

}  // namespace deltamesh
