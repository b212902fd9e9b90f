// Keeps the folder of packed files within a bound: the least recently used go first, never one that a
// process has mapped.
//
// A process holds a shared lock (flock) on a file as long as it has it mapped, and sets its access time when
// it takes it into use. Removing takes the lock under which files are packed, so that no new file of that
// name appears meanwhile, then an exclusive lock on the file itself. Whoever opened it a moment before sees
// that its name is gone and packs again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace deltamesh {

// Packed files of one folder, unless told otherwise.
inline constexpr int64_t kPackedBytesMax = int64_t{64} << 30;

struct PackedPrune {
  std::string folder;
  // Path that is never removed and does not count; the caller holds the lock under which it is packed, so
  // what is half of it was left by a process that died.
  std::string keep;
  int64_t bytes_max = 0;    // of the other packed files
  int64_t bytes_freed = 0;  // to be freed at least, whatever they take
};

// Returns the bytes freed; fewer than asked for when the others are in use. Also removes what packing
// processes that died have left. `note` is called with a line for each file; may be null.
int64_t PrunePacked(const PackedPrune& prune, const std::function<void(std::string_view)>& note);

// Marks an open packed file as in use by this process while the descriptor is open. False when its name is
// gone or going: pack again.
bool HoldPacked(int fd);

}  // namespace deltamesh
