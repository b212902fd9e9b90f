// One mapped .safetensors file, its header checked to the last byte before any tensor is handed
// out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace deltamesh {

// Element types that occur in headers. Only some of them are accepted by a model.
enum class DType : uint8_t { kF64, kF32, kF16, kBf16, kI64, kI32, kI16, kI8, kU8, kBool, kF8E8M0 };

int64_t DTypeBytes(DType dtype);
std::string_view DTypeName(DType dtype);  // as written in the header: "BF16"

// A view into a mapped file; valid as long as the file.
struct TensorView {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, any alignment

  int64_t elements() const;
};

std::string ShapeText(std::span<const int64_t> shape);  // "[3, 4]"

// Immutable, so threads may share it. Pages are read when first touched; a file that shrinks while
// mapped stops the process (SIGBUS): checkpoints must not be edited under a running server.
class SafetensorsFile {
 public:
  // NOT_FOUND when it is not there, INVALID_ARGUMENT for anything wrong with the header, DATA_LOSS
  // when the file is shorter than its header says. Messages name the file, and the tensor where
  // there is one.
  static absl::StatusOr<std::shared_ptr<const SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  // Size and times of the file that is mapped, whatever has the path by now.
  const std::string& version() const { return version_; }
  // FAILED_PRECONDITION when the path holds another file by now, or this one was written to.
  absl::Status CheckUnchanged() const;
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  // Takes the pages out of this process; they come back when touched.
  void ReleasePages() const;

 private:
  SafetensorsFile() = default;
  absl::Status ParseHeader();

  std::string path_, version_;
  std::span<const std::byte> file_;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

}  // namespace deltamesh
