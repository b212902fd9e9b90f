// The folder where the processes of a machine keep packed files: who packs, who waits, and what is
// served.
//
// A file is used only after its header, its directory and every piece that this process needs have
// been checked. One that fails is refused by name and packed again. One process packs at a time,
// under a lock file that also tells the waiting how far it is; a lock dies with its process.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/model/load_options.h"
#include "runtime/model/packed_file.h"

namespace deltamesh {

// What came of it.
struct PackedReport {
  std::string path;     // empty: packed in memory
  bool built = false;   // by this call
  int64_t refused = 0;  // files that were there and not fit to use
};

struct PackedTask {
  PackedKey key;
  std::function<absl::StatusOr<std::vector<PackedEntry>>()> plan;  // entries of the whole model
  // Fills a new file of that plan.
  std::function<absl::Status(PackedFileWriter&)> build;
  // Checks the pieces this process needs and takes the file into use. DATA_LOSS refuses the file.
  std::function<absl::Status(std::shared_ptr<const PackedFile>)> use;
};

// RESOURCE_EXHAUSTED, UNAVAILABLE and DEADLINE_EXCEEDED mean that the folder cannot serve (no room,
// not writable, another process hangs) and the weights may be packed in memory instead; other errors
// come from `build`.
absl::StatusOr<PackedReport> UsePackedFile(const LoadOptions& options, const PackedTask& task);

// The folder for a --packed-dir of "off" (empty), "auto" or a path. Automatic: none for checkpoints
// below kPackedWorthBytes, whose packing is not felt; else deltamesh/packed in the user's cache
// folder (XDG_CACHE_HOME, or .cache of HOME), else "packed" beside the tensors.
inline constexpr int64_t kPackedWorthBytes = int64_t{256} << 20;
std::string PackedFolder(std::string_view choice, const std::string& model);
// The same without the lower bound.
std::string DefaultPackedFolder(const std::string& model);

}  // namespace deltamesh
