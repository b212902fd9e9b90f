// What to load of a checkpoint, and how.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "runtime/model/packed_prune.h"

namespace deltamesh {

// Which routed experts to load.
struct ExpertSelection {
  enum class Kind { kAll, kNone, kList } kind = Kind::kAll;
  std::vector<int32_t> experts;  // for kList
};

// How wide the matrices are kept: as stored (BF16, F32, MXFP4), or BF16 and F32 matrices as 8-bit codes
// with a scale per 32 columns (gemm.h). The embedding table, the router and matrices whose columns are
// not a multiple of 32 stay as stored.
enum class WeightWidth : uint8_t { kStored, k8bit };
std::string_view WeightWidthName(WeightWidth width);  // "stored", "8bit"
// False for other names.
bool ParseWeightWidth(std::string_view name, WeightWidth* width);

// How the inputs of matrix products are taken: as float32, or quantised to 8 bits per 32 columns where the
// matrix holds 8-bit or MXFP4 weights (int8_activations.h). The two give different bits.
enum class Activations : uint8_t { kFloat, kInt8 };
std::string_view ActivationsName(Activations activations);  // "float", "int8"
// False for other names.
bool ParseActivations(std::string_view name, Activations* activations);

// Packed weights kept in a file and shared by the processes of a machine (packed_store.h).
struct PackedOptions {
  std::string folder;     // empty: pack in memory
  bool required = false;  // fail instead of packing in memory when the folder cannot serve
  // Longest wait for another process that packs and does not get on.
  absl::Duration patience = absl::Minutes(2);
  // Most bytes of packed files in the folder. Beyond it, and when the disk is full, those that no process
  // uses are removed before a new one is packed, the least recently used first.
  int64_t bytes_max = kPackedBytesMax;
  // Free bytes of a folder; null: as the system says.
  std::function<int64_t(const std::string&)> free_bytes;
};

struct LoadOptions {
  WeightWidth weights = WeightWidth::kStored;
  Activations activations = Activations::kFloat;
  ExpertSelection experts;
  bool only_experts = false;  // an expert shard: nothing but its experts is loaded
  int threads = 1;            // used while packing
  // Called now and then with bytes done and bytes in all; may be null.
  std::function<void(int64_t, int64_t)> progress;
  // The same for the model's digest, when it has to be taken.
  std::function<void(int64_t, int64_t)> digest_progress;
  PackedOptions packed;
  // Called with one line about what is packed where, or refused and why; may be null.
  std::function<void(std::string_view)> note;
};

}  // namespace deltamesh
