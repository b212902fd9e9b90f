#include "runtime/model/packed_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kPoll = absl::Milliseconds(50);
constexpr int64_t kMib = int64_t{1} << 20;
constexpr int64_t kSpareBytes = 64 * kMib;  // left free on the disk

void Note(const LoadOptions& options, const std::string& line) {
  if (options.note) options.note(line);
}

// Free bytes for this user, or -1 when the system does not tell.
int64_t FreeBytes(const LoadOptions& options, const std::string& folder) {
  if (options.packed.free_bytes) return options.packed.free_bytes(folder);
  struct statvfs info {};
  if (statvfs(folder.c_str(), &info) != 0) return -1;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

// Held by the process that packs. Its content is (bytes done, bytes in all).
class Lock {
 public:
  Lock() = default;
  ~Lock() {
    if (fd_ >= 0) close(fd_);  // which also unlocks
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  absl::Status Take(const std::string& path, const LoadOptions& options) {
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd_ < 0) return Unavailable("%s: cannot be created (%s)", path, std::strerror(errno));
    std::array<int64_t, 2> last{-1, -1};
    absl::Time moved = absl::Now();
    while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) {
        return Unavailable("%s: cannot be locked (%s)", path, std::strerror(errno));
      }
      if (last[1] == -1) Note(options, absl::StrFormat("%s: another process packs; waiting", path));
      const std::array<int64_t, 2> now = Read();
      if (now != last) moved = absl::Now();
      if (now != last && now[1] > 0 && options.progress) options.progress(now[0], now[1]);
      last = now;
      if (absl::Now() - moved > options.packed.patience) {
        return DeadlineExceeded("%s: the process that packs has not moved for %s", path,
                                absl::FormatDuration(options.packed.patience));
      }
      absl::SleepFor(kPoll);
    }
    Tell(0, 0);
    return absl::OkStatus();
  }

  // Failing to tell only leaves the waiting without news.
  void Tell(int64_t done, int64_t all) const {
    const std::array<int64_t, 2> news{done, all};
    [[maybe_unused]] const ssize_t n = pwrite(fd_, news.data(), sizeof(news), 0);
  }

 private:
  std::array<int64_t, 2> Read() const {
    std::array<int64_t, 2> news{};
    if (pread(fd_, news.data(), sizeof(news), 0) != sizeof(news)) return {};
    return news;
  }

  int fd_ = -1;
};

class Store {
 public:
  Store(const LoadOptions& options, const PackedTask& task)
      : options_(options), task_(task), path_(options.packed.folder + "/" + task.key.FileName()) {}

  absl::StatusOr<PackedReport> Run() {
    if (TryUse()) return Done(false);
    RETURN_IF_ERROR(failure_);
    std::error_code error;
    fs::create_directories(options_.packed.folder, error);
    if (error) {
      return Unavailable("%s: cannot be created (%s)", options_.packed.folder, error.message());
    }
    RETURN_IF_ERROR(lock_.Take(path_ + ".lock", options_));
    if (TryUse()) return Done(false);  // another process packed meanwhile
    RETURN_IF_ERROR(failure_);
    RETURN_IF_ERROR(Build());
    if (TryUse()) return Done(true);
    RETURN_IF_ERROR(failure_);
    return Unavailable("%s: cannot be read back", path_);
  }

 private:
  // False with `failure_` OK: there is no file fit to use.
  bool TryUse() {
    absl::StatusOr<std::shared_ptr<const PackedFile>> file = PackedFile::Open(path_, task_.key);
    const absl::Status status = file.ok() ? task_.use(*file) : file.status();
    if (status.ok()) return true;
    if (absl::IsNotFound(status)) return false;
    if (absl::IsDataLoss(status) || absl::IsFailedPrecondition(status)) {
      if (status != refusal_) {  // the same damage is found again under the lock
        ++refused_;
        Note(options_, absl::StrFormat("%s; refused, packing again", MessageOf(status)));
      }
      refusal_ = status;
      return false;
    }
    failure_ = status;
    return false;
  }

  absl::Status Build() {
    ASSIGN_OR_RETURN(std::vector<PackedEntry> entries, task_.plan());
    const int64_t bytes = PackedFileWriter::Place(entries);
    const int64_t room = MakeRoom(bytes);
    if (room >= 0 && room < bytes + kSpareBytes) {
      return ResourceExhausted(
          "%s: packed weights need %d MiB and %d MiB more that stay free, %d MiB are free; make "
          "room or "
          "name another --packed-dir",
          options_.packed.folder, (bytes + kMib - 1) / kMib, kSpareBytes / kMib, room / kMib);
    }
    Note(options_, absl::StrFormat("packing %d MiB into %s", bytes >> 20, path_));
    ASSIGN_OR_RETURN(auto writer, PackedFileWriter::Create(path_, task_.key, std::move(entries)));
    writer->on_progress = [this](int64_t done, int64_t all) { lock_.Tell(done, all); };
    RETURN_IF_ERROR(task_.build(*writer));
    return writer->Finish();
  }

  // Removes other files where a new one of `bytes` goes beyond the bound or the disk; the free bytes then.
  int64_t MakeRoom(int64_t bytes) {
    const std::string& folder = options_.packed.folder;
    const int64_t room = FreeBytes(options_, folder);
    const int64_t short_by = room < 0 ? 0 : std::max<int64_t>(0, bytes + kSpareBytes - room);
    const PackedPrune prune = {.folder = folder,
                               .keep = path_,
                               .bytes_max = std::max<int64_t>(0, options_.packed.bytes_max - bytes),
                               .bytes_freed = short_by};
    const int64_t freed =
        PrunePacked(prune, [this](std::string_view line) { Note(options_, std::string(line)); });
    return freed > 0 ? FreeBytes(options_, folder) : room;
  }

  PackedReport Done(bool built) const { return {path_, built, refused_}; }

  const LoadOptions& options_;
  const PackedTask& task_;
  const std::string path_;
  Lock lock_;
  int64_t refused_ = 0;
  absl::Status refusal_, failure_;
};

int64_t CheckpointBytes(const std::string& model) {
  int64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(model, error)) {
    std::error_code ignored;
    if (entry.path().extension() == ".safetensors" && entry.is_regular_file(ignored)) {
      bytes += static_cast<int64_t>(fs::file_size(entry.path(), ignored));
    }
  }
  return bytes;
}

}  // namespace

absl::StatusOr<PackedReport> UsePackedFile(const LoadOptions& options, const PackedTask& task) {
  return Store(options, task).Run();
}

std::string DefaultPackedFolder(const std::string& model) {
  // Read once while starting, before other threads exist.
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && cache[0] == '/') return std::string(cache) + "/deltamesh/packed";
  const char* home = std::getenv("HOME");
  if (home != nullptr && home[0] == '/') return std::string(home) + "/.cache/deltamesh/packed";
  return model + "/packed";
}

std::string PackedFolder(std::string_view choice, const std::string& model) {
  if (choice == "off") return "";
  if (choice != "auto") return std::string(choice);
  return CheckpointBytes(model) < kPackedWorthBytes ? "" : DefaultPackedFolder(model);
}

}  // namespace deltamesh
