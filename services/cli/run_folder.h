// A temporary folder of a process: removed at its end, or, when the process is killed, by the next one of the
// same user that makes such a folder.
//
// Its name tells the process, and its process holds a lock on it: only a folder of this user whose process is
// not there and that nobody has locked is removed, and none that changed within kYoung, which may be about to
// be locked (another container's process is not seen here, its lock is).
//
// Not thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace deltamesh {

class RunFolder {
 public:
  static constexpr absl::Duration kYoung = absl::Minutes(1);

  // Within TMPDIR, after abandoned ones there are gone.
  static absl::StatusOr<std::unique_ptr<RunFolder>> Create();
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::string& path() const { return path_; }

  // Removes abandoned folders within `parent`, at most kRemovedMax of its first kLookedAtMax entries; how
  // many.
  static constexpr int kRemovedMax = 64, kLookedAtMax = 1 << 16;
  static int RemoveAbandoned(const std::string& parent, absl::Time now);

 private:
  RunFolder(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  const std::string path_;
  const int lock_;  // an open file
};

}  // namespace deltamesh
