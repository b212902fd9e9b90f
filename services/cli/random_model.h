// Checkpoints with random weights in the published layout of Kimi-Linear, for measurements of shapes that
// nobody trained. The same shape and seed give the same files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace deltamesh {

struct RandomShape {
  int64_t hidden = 256, layers = 8;
  std::vector<int64_t> full = {4, 8};  // layers (1-based) with MLA; the others have KDA
  int64_t kda_heads = 4, kda_dim = 64;
  int64_t heads = 4, nope = 32, rope = 32, v_dim = 32, rank = 64;
  int64_t dense_inter = 512, moe_inter = 64, experts = 8, top_k = 2;
  int64_t vocab = 512;
};

// config.json and one .safetensors file in `folder`, which is made. UNAVAILABLE when it cannot be written.
absl::Status WriteRandomModel(const RandomShape& shape, uint64_t seed, const std::string& folder);

// A folder of its own below the system's temporary one, removed with the object.
class ScratchFolder {
 public:
  static absl::StatusOr<std::unique_ptr<ScratchFolder>> Create();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  explicit ScratchFolder(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

}  // namespace deltamesh
