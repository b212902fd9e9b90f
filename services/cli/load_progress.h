// How far the loading of weights is, for tools that load in their own process.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string_view>

#include "runtime/base/clock.h"

namespace deltamesh {

// For LoadOptions::progress. Quiet while loading is quick: the first word comes after two seconds, then at
// most one a second. With `terminal` the line is written over, else each is a line. `clock` and `notes` must
// outlive it.
std::function<void(int64_t done, int64_t all)> LoadProgress(const Clock* clock, std::ostream* notes,
                                                            bool terminal);
// For LoadOptions::note: each line as it is. `notes` must outlive it.
std::function<void(std::string_view)> LoadNotes(std::ostream* notes);
// To standard error.
std::function<void(int64_t done, int64_t all)> LoadProgress(const Clock* clock);

}  // namespace deltamesh
