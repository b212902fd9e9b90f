// How far the loading of weights is, for tools that load in their own process.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "runtime/base/clock.h"
#include "runtime/model/load_options.h"

namespace CLI {
class App;
}

namespace deltamesh {

// For LoadOptions::progress. Quiet while loading is quick: the first word comes after two seconds, then at
// most one a second. With `terminal` the line is written over, else each is a line. `clock` and `notes` must
// outlive it.
std::function<void(int64_t done, int64_t all)> LoadProgress(const Clock* clock, std::ostream* notes,
                                                            bool terminal);

// The flags that ToolLoadOptions takes, with their names in the environment. The targets hold the defaults
// and must outlive `app`.
void AddToolLoadFlags(CLI::App* app, std::string* weights, std::string* activations,
                      std::string* packed_dir);

// What a tool's flags say about loading: `threads` (0: one per processor), `weights` (stored or 8bit),
// `activations` (float or int8) and `packed_dir` (off, auto or a folder). Progress and remarks go to
// `notes`, standard error or what stands in for it. `clock` and `notes` must outlive the load.
// INVALID_ARGUMENT for other names.
absl::StatusOr<LoadOptions> ToolLoadOptions(const std::string& model, int threads,
                                            std::string_view weights, std::string_view activations,
                                            std::string_view packed_dir, const Clock* clock,
                                            std::ostream* notes);

}  // namespace deltamesh
