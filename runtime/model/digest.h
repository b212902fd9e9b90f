// The digest by which workers of one mesh agree that they serve the same weights.
//
// SHA-256 over config.json in canonical form (parsed, keys sorted), the tokenizer files, and the
// sorted table of (name, dtype, shape, content checksum). The content checksum is the CRC32C of all
// bytes of a tensor up to a limit, and of evenly spaced pages of a larger one: a sampled digest, so
// that a shard which loads few experts can compute it without reading a terabyte. Routed experts
// are so many that their limit and their sample are smaller. It finds another model or another
// revision, not every flipped bit of a large tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/model/checkpoint.h"
#include "runtime/model/load_options.h"

namespace deltamesh {

inline constexpr int64_t kWholeBytes = int64_t{1} << 20;
inline constexpr int64_t kSamplePages = 16;
inline constexpr int64_t kExpertWholeBytes = int64_t{64} << 10;
inline constexpr int64_t kExpertSamplePages = 2;
inline constexpr int64_t kSamplePageBytes = 4096;

// 64 lower-case hex digits. The same for attention workers and expert shards of one checkpoint;
// where tensors are cut into files does not enter. `progress` is called before each tensor and after the last
// with tensors done and tensors in all; may be null.
absl::StatusOr<std::string> ModelDigest(const Checkpoint& checkpoint,
                                        const std::function<void(int64_t, int64_t)>& progress = {});

// The name under which these very files are packed: the model's digest with each file's name, size and
// times of change. The digest alone samples; a file that was written again, or copied, counts as another
// one. NOT_FOUND when a file is gone. `model_digest` is ModelDigest of the same checkpoint.
absl::StatusOr<std::string> SourceDigest(const Checkpoint& checkpoint,
                                         const std::string& model_digest);

// The digest of what a process computes with: the model's own for weights as stored, another one for
// every other width, so that workers of different widths refuse each other.
std::string ServedDigest(const std::string& model_digest, WeightWidth weights);

}  // namespace deltamesh
