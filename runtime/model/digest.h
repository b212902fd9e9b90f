// The digest by which workers of one mesh agree that they serve the same weights.
//
// SHA-256 over config.json in canonical form (parsed, keys sorted), the tokenizer files, and the
// sorted table of (name, dtype, shape, CRC32C of every byte). Reading all bytes takes about a second
// for some gigabytes, so a digest is remembered where the packed weights are kept, under the name
// of the very files it was taken of.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/model/checkpoint.h"
#include "runtime/model/load_options.h"

namespace deltamesh {

// 64 lower-case hex digits. The same for attention workers and expert shards of one checkpoint;
// where tensors are cut into files does not enter. Reads with `threads` threads. `progress` is called
// on this thread with bytes done and bytes in all, ascending, the last time with all; may be null.
absl::StatusOr<std::string> ModelDigest(const Checkpoint& checkpoint,
                                        const std::function<void(int64_t, int64_t)>& progress = {},
                                        int threads = 1);

// Names the very files of a checkpoint without reading their tensors: configuration, tokenizer, table
// of tensors, and each file's name, size and times of change. Files that were written again or copied
// are others. NOT_FOUND when one is gone. 64 lower-case hex digits.
absl::StatusOr<std::string> SourceDigest(const Checkpoint& checkpoint);

// ModelDigest, taken from or left in `options.packed.folder` (none: computed each time). `source` is
// SourceDigest of the same checkpoint. A record that is damaged is written again; a folder that
// cannot be written is noted.
absl::StatusOr<std::string> RememberedModelDigest(const Checkpoint& checkpoint,
                                                  const std::string& source,
                                                  const LoadOptions& options);

// The digest of what a process computes with: the model's own for weights as stored and float activations,
// another one for everything else, so that workers whose bits would differ refuse each other.
std::string ServedDigest(const std::string& model_digest, WeightWidth weights,
                         Activations activations);

}  // namespace deltamesh
