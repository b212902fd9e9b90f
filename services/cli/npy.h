// Float32 arrays in numpy's .npy format, written piece by piece.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace deltamesh {

// Move-only. Without a successful Close() the file is incomplete.
class NpyWriter {
 public:
  // Creates or replaces `path`. Errors name the file and the system's reason.
  static absl::StatusOr<NpyWriter> Create(const std::string& path,
                                          const std::vector<int64_t>& shape);
  ~NpyWriter();
  NpyWriter(NpyWriter&& other) noexcept;
  NpyWriter& operator=(NpyWriter&&) = delete;

  // The next values in row-major order.
  absl::Status Write(std::span<const float> values);
  // FAILED_PRECONDITION unless exactly as many values came as the shape holds.
  absl::Status Close();

 private:
  NpyWriter(std::string path, std::FILE* file, int64_t missing)
      : path_(std::move(path)), file_(file), missing_(missing) {}
  std::string path_;
  std::FILE* file_;
  int64_t missing_;  // values still to come
};

// A whole array at once.
absl::Status WriteNpy(const std::string& path, const std::vector<int64_t>& shape,
                      std::span<const float> values);

}  // namespace deltamesh
