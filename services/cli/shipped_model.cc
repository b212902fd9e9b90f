#include "services/cli/shipped_model.h"

#include <filesystem>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

namespace fs = std::filesystem;

// From the program's folder: of an installation, and of a build folder within the sources.
constexpr const char* kPlaces[] = {"../share/deltamesh/models/reader", "../../models/reader"};

}  // namespace

absl::StatusOr<std::string> ShippedModel() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error).parent_path();
  std::string looked;
  for (const char* place : kPlaces) {
    const fs::path folder = (program / place).lexically_normal();
    if (fs::exists(folder / "config.json", error)) return folder.string();
    looked += (looked.empty() ? "" : " and ") + folder.string();
  }
  return NotFound(
      "model: none is named, and the one that comes with deltamesh is not at %s; use --model",
      looked);
}

}  // namespace deltamesh
