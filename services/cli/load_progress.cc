#include "services/cli/load_progress.h"

#include <unistd.h>

#include <iostream>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kQuiet = absl::Seconds(2);
constexpr absl::Duration kPause = absl::Seconds(1);

}  // namespace

std::function<void(int64_t, int64_t)> LoadProgress(const Clock* clock, std::ostream* notes,
                                                   bool terminal) {
  return [=, due = clock->Now() + kQuiet, open = false](int64_t done, int64_t all) mutable {
    const absl::Time now = clock->Now();
    if (now >= due || (open && done == all)) {
      due = now + kPause;
      *notes << (terminal ? "\r" : "")
             << absl::StrFormat("loading weights: %d of %d MiB, %d %%", done >> 20, all >> 20,
                                all > 0 ? done * 100 / all : 100)
             << (terminal ? "" : "\n") << std::flush;
      open = terminal;
    }
    if (open && done == all) {
      *notes << std::endl;
      open = false;
    }
  };
}

std::function<void(std::string_view)> LoadNotes(std::ostream* notes) {
  return [=](std::string_view line) { *notes << line << std::endl; };
}

std::function<void(int64_t, int64_t)> LoadProgress(const Clock* clock) {
  return LoadProgress(clock, &std::cerr, isatty(STDERR_FILENO) != 0);
}

}  // namespace deltamesh
