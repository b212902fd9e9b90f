#include "runtime/model/packed_prune.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPacked = ".packed", kPartial = ".partial";

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags)
      : fd_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);  // which also unlocks
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd() const { return fd_; }
  bool LockNow(int how) const { return fd_ >= 0 && flock(fd_, how | LOCK_NB) == 0; }

 private:
  const int fd_;
};

struct Candidate {
  std::string path;
  std::string packed;  // the packed file it is or was to become
  int64_t bytes = 0;
  timespec used{};
  bool partial = false;
  bool locked = false;  // by the caller
};

bool Before(const timespec& a, const timespec& b) {
  return a.tv_sec != b.tv_sec ? a.tv_sec < b.tv_sec : a.tv_nsec < b.tv_nsec;
}

// What is no packed file, whole or partial, is left alone.
std::vector<Candidate> List(const PackedPrune& prune) {
  std::vector<Candidate> out;
  std::error_code error;
  for (auto it = fs::directory_iterator(prune.folder, error); !error && it != fs::end(it);
       it.increment(error)) {
    Candidate c{.path = it->path().string(), .packed = it->path().string()};
    c.partial = c.path.ends_with(kPartial);
    if (c.partial) {  // NAME.packed.PID.partial
      c.packed.resize(c.packed.size() - kPartial.size());
      c.packed.resize(std::min(c.packed.rfind('.'), c.packed.size()));
    }
    struct stat info {};
    if (!c.packed.ends_with(kPacked) || c.path == prune.keep || lstat(c.path.c_str(), &info) != 0 ||
        !S_ISREG(info.st_mode)) {
      continue;
    }
    c.locked = c.packed == prune.keep;
    c.bytes = static_cast<int64_t>(info.st_size);
    c.used = info.st_atim;
    out.push_back(std::move(c));
  }
  std::sort(out.begin(), out.end(), [](const Candidate& a, const Candidate& b) {
    return a.partial != b.partial ? a.partial : Before(a.used, b.used);
  });
  return out;
}

bool Remove(const Candidate& c) {
  std::optional<Descriptor> packing;
  if (!c.locked && !packing.emplace(c.packed + ".lock", O_RDWR | O_CREAT).LockNow(LOCK_EX))
    return false;
  const Descriptor file(c.path, O_RDONLY);
  return file.LockNow(LOCK_EX) && unlink(c.path.c_str()) == 0;
}

}  // namespace

int64_t PrunePacked(const PackedPrune& prune, const std::function<void(std::string_view)>& note) {
  const std::vector<Candidate> candidates = List(prune);
  int64_t all = 0, freed = 0;
  for (const Candidate& c : candidates) all += c.bytes;
  const int64_t wanted = std::max(all - prune.bytes_max, prune.bytes_freed);
  for (const Candidate& c : candidates) {
    if (!c.partial && freed >= wanted) break;
    if (!Remove(c)) continue;
    freed += c.bytes;
    if (note) {
      note(absl::StrFormat("%s: removed, %d MiB that %s", c.path, c.bytes >> 20,
                           c.partial ? "a process left when it died" : "were used least recently"));
    }
  }
  return freed;
}

bool HoldPacked(int fd) {
  struct stat info {};
  if (flock(fd, LOCK_SH | LOCK_NB) != 0 || fstat(fd, &info) != 0 || info.st_nlink == 0)
    return false;
  const timespec times[2] = {{.tv_sec = 0, .tv_nsec = UTIME_NOW},
                             {.tv_sec = 0, .tv_nsec = UTIME_OMIT}};
  futimens(fd, times);  // a file of another user keeps its time
  return true;
}

}  // namespace deltamesh
