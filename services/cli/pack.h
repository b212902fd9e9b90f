// `deltamesh pack`: packs a checkpoint's weights ahead of time into the folder where workers look for
// them. What is there already is checked to the last byte, and packed again if it is damaged.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace deltamesh {

struct PackOptions {
  std::string model;               // checkpoint folder
  std::string weights = "stored";  // width of matrices: stored or 8bit
  std::string packed_dir =
      "auto";       // a folder, or the default one; small checkpoints are packed too
  int threads = 0;  // 0: as many as the machine has processors
};

void AddPackFlags(CLI::App* app, PackOptions* options);

// Says on `out` which file holds the weights; progress goes to `notes`.
absl::Status RunPack(const PackOptions& options, std::ostream& out, std::ostream& notes);

}  // namespace deltamesh
