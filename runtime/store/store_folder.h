// A folder of files that several processes read and write: whole files appear by an atomic rename, whoever
// wants room holds the lock. Knows names and bytes, no formats.
//
// When a file was last used is its access time, which only Touch sets: reading here leaves it alone where the
// system lets it. The modification time, with the inode, tells files of one name apart.
//
// A writer holds its temporary file locked while it lives, so a temporary file that can be locked was left
// by a crash.
//
// What is made here only its user may read: prompts and conversations lie in it.
//
// Thread-safe, but for FolderLock and TemporaryFile, which belong to one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/store/byte_reader.h"

namespace deltamesh {

// Full disk RESOURCE_EXHAUSTED, no such file NOT_FOUND, no permission or read-only FAILED_PRECONDITION,
// too many open files UNAVAILABLE, others INTERNAL. `doing` names the action and the file.
absl::Status ErrnoStatus(int error, const std::string& doing);
// Whether a status of ErrnoStatus says that the disk, or a user's share of it, is full: less would help.
bool IsDiskFull(const absl::Status& status);

// Reserves `bytes` for a new file; 0 or an errno.
using ReserveSpace = std::function<int(int fd, int64_t bytes)>;
int ReserveOnDisk(int fd, int64_t bytes);

struct FolderEntry {
  std::string name;
  int64_t bytes = 0;
  absl::Time used;
  uint64_t version = 0;  // another one after the name was given to another file
};

class FolderLock {
 public:
  explicit FolderLock(int fd) : fd_(fd) {}
  FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock();

 private:
  int fd_;
};

// A file in the making; removed unless Commit was reached.
class TemporaryFile {
 public:
  TemporaryFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  TemporaryFile(TemporaryFile&& other) noexcept
      : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
  TemporaryFile& operator=(TemporaryFile&&) = delete;
  ~TemporaryFile();

  // Writes everything and waits until it is on the disk.
  absl::Status Write(const BytePieces& pieces);
  const std::string& path() const { return path_; }

 private:
  friend class StoreFolder;
  std::string path_;
  int fd_;
};

class StoreFolder {
 public:
  static constexpr absl::Duration kLockMax = absl::Seconds(10);

  // Makes the folder, and those above it, when it is not there; a crash afterwards does not undo those that
  // it made. Errors name the flag, --store-dir.
  static absl::StatusOr<std::unique_ptr<StoreFolder>> Open(std::string path,
                                                           ReserveSpace reserve = ReserveOnDisk,
                                                           absl::Duration lock_max = kLockMax);

  // Waits for others, which hold it for moments only; UNAVAILABLE when one still has it after `lock_max`.
  absl::StatusOr<FolderLock> Lock() const;

  // Under the lock: makes a temporary file of `bytes`, which count from now on.
  absl::StatusOr<TemporaryFile> Create(int64_t bytes, absl::Time now) const;
  // Under the lock: gives it its name, in place of what had it. Used now.
  absl::StatusOr<FolderEntry> Commit(TemporaryFile file, const std::string& name,
                                     absl::Time now) const;
  // Under the lock: makes an empty file.
  absl::Status Mark(const std::string& name) const;
  // Waits until the names that were given and the marks that were made are on the disk: before, a crash
  // may undo them.
  absl::Status Flush() const;
  // Under the lock: removes what crashed writers left; how many files.
  int64_t SweepLeftovers() const;

  // Everything but the lock; temporary files have names for which IsTemporary holds.
  absl::StatusOr<std::vector<FolderEntry>> List() const;
  static bool IsTemporary(const std::string& name);

  absl::StatusOr<std::unique_ptr<ByteReader>> OpenFile(const std::string& name) const;
  bool Has(const std::string& name) const;
  absl::Status Remove(const std::string& name) const;
  // Sets when it was last used; errors do not matter.
  void Touch(const std::string& name, absl::Time used) const;

  const std::string& path() const { return path_; }

 private:
  StoreFolder(std::string path, ReserveSpace reserve, absl::Duration lock_max)
      : path_(std::move(path)), reserve_(std::move(reserve)), lock_max_(lock_max) {}
  // ErrnoStatus; UNAVAILABLE when what is not there is the folder.
  absl::Status StatusOf(int error, const std::string& doing) const;
  std::string PathOf(const std::string& name) const { return path_ + "/" + name; }

  const std::string path_;
  const ReserveSpace reserve_;
  const absl::Duration lock_max_;
};

}  // namespace deltamesh
