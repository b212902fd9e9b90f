#include "runtime/store/store_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/cord.h"
#include "absl/time/clock.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr char kLockName[] = "lock";
constexpr char kTemporary[] = ".writing-";
constexpr mode_t kFileMode = 0600, kFolderMode = 0700;
constexpr absl::Duration kLockPauseMin = absl::Microseconds(100),
                         kLockPauseMax = absl::Milliseconds(5);
constexpr char kDiskFull[] = "deltamesh/disk-full";  // of a status

// One file that stays open, so that it can be read to its end when its name is gone.
class FileReader final : public ByteReader {
 public:
  FileReader(int fd, int64_t size, std::string path)
      : fd_(fd), size_(size), path_(std::move(path)) {}
  ~FileReader() override { close(fd_); }
  int64_t size() const override { return size_; }

  absl::Status Read(int64_t offset, std::span<const std::span<std::byte>> pieces) override {
    for (const std::span<std::byte> piece : pieces) {
      for (size_t done = 0; done < piece.size();) {
        const ssize_t n = pread(fd_, piece.data() + done, piece.size() - done, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return ErrnoStatus(errno, "read " + path_);
        if (n == 0) return absl::OutOfRangeError(absl::StrFormat("%s ends at %d", path_, offset));
        done += static_cast<size_t>(n);
        offset += n;
      }
    }
    return absl::OkStatus();
  }

 private:
  const int fd_;
  const int64_t size_;
  const std::string path_;
};

FolderEntry EntryOf(const std::string& name, const struct stat& found) {
  const auto modified =
      static_cast<uint64_t>(absl::ToUnixNanos(absl::TimeFromTimespec(found.st_mtim)));
  return {.name = name,
          .bytes = found.st_size,
          .used = absl::TimeFromTimespec(found.st_atim),
          .version = modified * 0x9e3779b97f4a7c15u + found.st_ino};
}

// Waits until the names in a folder are on the disk; 0 or an errno.
int FlushNames(const std::string& path) {
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return errno;
  const int error = fsync(folder) == 0 ? 0 : errno;
  close(folder);
  // Some file systems keep names without being asked, and say that folders cannot be flushed.
  return error == EINVAL || error == EOPNOTSUPP ? 0 : error;
}

// The same for the name of a folder, also where its parent can be written and not read.
int FlushNameOf(const std::string& made) {
  const std::string parent = std::filesystem::path(made).parent_path();
  const int error_of_parent = FlushNames(parent.empty() ? "." : parent);
  if (error_of_parent != EACCES) return error_of_parent;
  const int folder = open(made.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return errno;
  const int error = syncfs(folder) == 0 ? 0 : errno;
  close(folder);
  return error;
}

}  // namespace

absl::Status ErrnoStatus(int error, const std::string& doing) {
  const std::string text = absl::StrFormat("%s: %s", doing, std::strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT: {
      absl::Status full = ResourceExhausted("%s; free some of the disk or lower --store-gib", text);
      full.SetPayload(kDiskFull, absl::Cord());
      return full;
    }
    case EFBIG:
      return ResourceExhausted("%s; free some of the disk or lower --store-gib", text);
    case ENOENT:
    case ENOTDIR:
      return NotFound("%s", text);
    case EACCES:
    case EPERM:
    case EROFS:
      return FailedPrecondition("%s; make --store-dir a folder that this user may write", text);
    case EMFILE:
    case ENFILE:
      return Unavailable("%s; raise the limit on open files (ulimit -n)", text);
    default:
      return Internal("%s", text);
  }
}

bool IsDiskFull(const absl::Status& status) { return status.GetPayload(kDiskFull).has_value(); }

// A file system that cannot reserve still counts the bytes.
int ReserveOnDisk(int fd, int64_t bytes) {
  if (fallocate(fd, 0, 0, bytes) == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  return ftruncate(fd, bytes) == 0 ? 0 : errno;
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) close(fd_);  // and with it the lock
}

TemporaryFile::~TemporaryFile() {
  if (fd_ < 0) return;
  unlink(path_.c_str());
  close(fd_);
}

absl::Status TemporaryFile::Write(const BytePieces& pieces) {
  int64_t offset = 0;
  for (const auto& piece : pieces) {
    for (size_t done = 0; done < piece.size();) {
      const ssize_t n = pwrite(fd_, piece.data() + done, piece.size() - done, offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrnoStatus(errno, "write " + path_);
      done += static_cast<size_t>(n);
      offset += n;
    }
  }
  if (fsync(fd_) != 0) return ErrnoStatus(errno, "write " + path_ + " to the disk");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StoreFolder>> StoreFolder::Open(std::string path,
                                                               ReserveSpace reserve,
                                                               absl::Duration lock_max) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    struct stat found;
    if (stat(part.c_str(), &found) != 0) {
      if (mkdir(part.c_str(), kFolderMode) != 0 && errno != EEXIST) {
        return Annotate(ErrnoStatus(errno, "make the folder " + part), "--store-dir");
      }
      // Else a crash may undo the folder, and with it files that were flushed into it.
      if (const int error = FlushNameOf(part); error != 0) {
        return Annotate(ErrnoStatus(error, "write the name of the folder " + part + " to the disk"),
                        "--store-dir");
      }
    }
    if (end == std::string::npos) break;
  }
  struct stat found;
  if (stat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) {
    return FailedPrecondition("--store-dir: %s is not a folder; name one", path);
  }
  return std::unique_ptr<StoreFolder>(
      new StoreFolder(std::move(path), std::move(reserve), lock_max));
}

// A folder that is gone (a disk that was pulled, a folder that was moved) is not a file that is not there:
// whoever hears that of a record begins its conversation anew.
absl::Status StoreFolder::StatusOf(int error, const std::string& doing) const {
  struct stat found;
  const bool gone = stat(path_.c_str(), &found) != 0 || !S_ISDIR(found.st_mode);
  if ((error != ENOENT && error != ENOTDIR) || !gone) return ErrnoStatus(error, doing);
  return Unavailable("%s: the folder of --store-dir is gone; bring %s back", doing, path_);
}

absl::StatusOr<FolderLock> StoreFolder::Lock() const {
  const std::string path = PathOf(kLockName);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kFileMode);
  if (fd < 0) return StatusOf(errno, "open " + path);
  FolderLock lock(fd);
  const absl::Time give_up = absl::Now() + lock_max_;
  // Asked for again and again: a wait for a lock has no deadline.
  for (absl::Duration pause = kLockPauseMin; flock(fd, LOCK_EX | LOCK_NB) != 0;
       pause = std::min(2 * pause, kLockPauseMax)) {
    if (errno != EWOULDBLOCK && errno != EINTR) return ErrnoStatus(errno, "lock " + path);
    if (absl::Now() >= give_up) {
      return Unavailable("lock %s: another process has held it for %s; end it if it hangs", path,
                         absl::FormatDuration(lock_max_));
    }
    absl::SleepFor(pause);
  }
  return lock;
}

absl::StatusOr<TemporaryFile> StoreFolder::Create(int64_t bytes, absl::Time now) const {
  static std::atomic<uint64_t> next{0};
  const std::string path = PathOf(absl::StrFormat("%s%d-%d-%d", kTemporary, getpid(),
                                                  absl::ToUnixNanos(now), next.fetch_add(1)));
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kFileMode);
  if (fd < 0) return StatusOf(errno, "make " + path);
  TemporaryFile file(path, fd);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) return ErrnoStatus(errno, "lock " + path);
  // Space that is not there shows now, not half way.
  if (const int error = reserve_(fd, bytes); error != 0)
    return ErrnoStatus(error, "reserve " + path);
  return file;
}

absl::StatusOr<FolderEntry> StoreFolder::Commit(TemporaryFile file, const std::string& name,
                                                absl::Time now) const {
  const std::string to = PathOf(name);
  const timespec times[2] = {absl::ToTimespec(now), {0, UTIME_OMIT}};
  struct stat found;
  if (futimens(file.fd_, times) != 0 || fstat(file.fd_, &found) != 0 ||
      rename(file.path_.c_str(), to.c_str()) != 0) {
    return StatusOf(errno, "rename to " + to);
  }
  close(std::exchange(file.fd_, -1));
  return EntryOf(name, found);
}

absl::Status StoreFolder::Flush() const {
  const int error = FlushNames(path_);
  return error == 0 ? absl::OkStatus()
                    : StatusOf(error, "write the names in " + path_ + " to the disk");
}

absl::Status StoreFolder::Mark(const std::string& name) const {
  const std::string path = PathOf(name);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kFileMode);
  if (fd < 0) return StatusOf(errno, "make " + path);
  close(fd);
  return absl::OkStatus();
}

bool StoreFolder::IsTemporary(const std::string& name) { return name.starts_with(kTemporary); }

int64_t StoreFolder::SweepLeftovers() const {
  int64_t swept = 0;
  const absl::StatusOr<std::vector<FolderEntry>> entries = List();
  if (!entries.ok()) return 0;
  for (const FolderEntry& entry : *entries) {
    if (!IsTemporary(entry.name)) continue;
    const int fd = open(PathOf(entry.name).c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) swept += unlink(PathOf(entry.name).c_str()) == 0;
    close(fd);
  }
  return swept;
}

absl::StatusOr<std::vector<FolderEntry>> StoreFolder::List() const {
  DIR* const dir = opendir(path_.c_str());
  if (dir == nullptr) return StatusOf(errno, "list " + path_);
  std::vector<FolderEntry> out;
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    struct stat found;
    if (name == kLockName || fstatat(dirfd(dir), entry->d_name, &found, 0) != 0 ||
        !S_ISREG(found.st_mode)) {
      continue;
    }
    out.push_back(EntryOf(name, found));
  }
  closedir(dir);
  return out;
}

absl::StatusOr<std::unique_ptr<ByteReader>> StoreFolder::OpenFile(const std::string& name) const {
  const std::string path = PathOf(name);
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOATIME);
  if (fd < 0 && errno == EPERM) fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);  // another user's
  if (fd < 0) return StatusOf(errno, "open " + path);
  struct stat found;
  if (fstat(fd, &found) != 0) {
    const int error = errno;
    close(fd);
    return ErrnoStatus(error, "look at " + path);
  }
  return std::make_unique<FileReader>(fd, found.st_size, path);
}

bool StoreFolder::Has(const std::string& name) const {
  return access(PathOf(name).c_str(), F_OK) == 0;
}

absl::Status StoreFolder::Remove(const std::string& name) const {
  if (unlink(PathOf(name).c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return ErrnoStatus(errno, "remove " + PathOf(name));
}

void StoreFolder::Touch(const std::string& name, absl::Time used) const {
  const timespec times[2] = {absl::ToTimespec(used), {0, UTIME_OMIT}};
  utimensat(AT_FDCWD, PathOf(name).c_str(), times, 0);
}

}  // namespace deltamesh
