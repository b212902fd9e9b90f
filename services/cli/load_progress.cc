#include "services/cli/load_progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "runtime/base/status.h"
#include "runtime/model/packed_store.h"

namespace deltamesh {
namespace {

constexpr absl::Duration kQuiet = absl::Seconds(2);
constexpr absl::Duration kPause = absl::Seconds(1);

// The bound of the workers' flag, which tools only take from the environment.
absl::StatusOr<int64_t> PackedBytesMax() {
  const char* text = std::getenv("DELTAMESH_PACKED_MAX_GIB");
  if (text == nullptr || *text == '\0') return kPackedBytesMax;
  double gib = 0;
  if (!absl::SimpleAtod(text, &gib) || !(gib >= 0 && gib <= 1e6)) {
    return InvalidArgument("DELTAMESH_PACKED_MAX_GIB: \"%s\"; use a number from 0 to 1000000",
                           text);
  }
  return static_cast<int64_t>(gib * (int64_t{1} << 30));
}

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

void AddToolLoadFlags(CLI::App* app, std::string* weights, std::string* activations,
                      std::string* packed_dir) {
  app->add_option("--weights", *weights, "width of matrices: as stored, or 8bit")
      ->envname("DELTAMESH_WEIGHTS")
      ->check(CLI::IsMember({"stored", "8bit"}))
      ->capture_default_str();
  app->add_option("--activations", *activations,
                  "inputs of 8-bit and MXFP4 matrices: float, or int8, which is faster")
      ->envname("DELTAMESH_ACTIVATIONS")
      ->check(CLI::IsMember({"float", "int8"}))
      ->capture_default_str();
  app->add_option("--packed-dir", *packed_dir, "folder of packed weights, auto or off")
      ->envname("DELTAMESH_PACKED_DIR")
      ->capture_default_str();
}

absl::StatusOr<LoadOptions> ToolLoadOptions(const std::string& model, int threads,
                                            std::string_view weights, std::string_view activations,
                                            std::string_view packed_dir, const Clock* clock,
                                            std::ostream* notes) {
  LoadOptions load;
  if (!ParseWeightWidth(weights, &load.weights)) {
    return InvalidArgument("weights: \"%s\" is no width; use stored or 8bit", weights);
  }
  if (!ParseActivations(activations, &load.activations)) {
    return InvalidArgument("activations: \"%s\" is no way to take them; use float or int8",
                           activations);
  }
  load.threads =
      threads > 0 ? threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  load.packed.folder = PackedFolder(packed_dir, model);
  ASSIGN_OR_RETURN(load.packed.bytes_max, PackedBytesMax());
  load.note = [=](std::string_view line) { *notes << line << std::endl; };
  load.progress = LoadProgress(clock, notes, isatty(STDERR_FILENO) != 0);
  load.digest_progress = load.progress;
  return load;
}

}  // namespace deltamesh
