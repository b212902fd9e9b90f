#include "services/cli/npy.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {

static_assert(std::endian::native == std::endian::little, "the header below says little-endian");

namespace {

absl::Status FileError(const std::string& path, const char* what) {
  return InvalidArgument("%s: cannot %s: %s; choose a writable place with room", path, what,
                         std::strerror(errno));
}

// Version 1.0: magic, version, header length, then a Python literal padded so that data is aligned.
std::string Header(const std::vector<int64_t>& shape) {
  std::string dims;
  for (const int64_t n : shape) dims += std::to_string(n) + ",";
  std::string text = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + dims + "), }";
  constexpr size_t kPrefix = 10, kAlign = 64;
  while ((kPrefix + text.size() + 1) % kAlign != 0) text += ' ';
  text += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(text.size() & 0xFF);
  header += static_cast<char>(text.size() >> 8);
  return header + text;
}

}  // namespace

absl::StatusOr<NpyWriter> NpyWriter::Create(const std::string& path,
                                            const std::vector<int64_t>& shape) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return FileError(path, "create");
  int64_t values = 1;
  for (const int64_t n : shape) values *= n;
  NpyWriter writer(path, file, values);
  const std::string header = Header(shape);
  if (std::fwrite(header.data(), 1, header.size(), file) != header.size()) {
    return FileError(path, "write");
  }
  return writer;
}

NpyWriter::NpyWriter(NpyWriter&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, nullptr)),
      missing_(other.missing_) {}

NpyWriter::~NpyWriter() {
  if (file_ != nullptr) std::fclose(file_);
}

absl::Status NpyWriter::Write(std::span<const float> values) {
  if (std::fwrite(values.data(), sizeof(float), values.size(), file_) != values.size()) {
    return FileError(path_, "write");
  }
  missing_ -= static_cast<int64_t>(values.size());
  return absl::OkStatus();
}

absl::Status NpyWriter::Close() {
  if (missing_ != 0) {
    return FailedPrecondition("%s: %d values are missing; write all of the shape", path_, missing_);
  }
  if (std::fclose(std::exchange(file_, nullptr)) != 0) return FileError(path_, "close");
  return absl::OkStatus();
}

absl::Status WriteNpy(const std::string& path, const std::vector<int64_t>& shape,
                      std::span<const float> values) {
  ASSIGN_OR_RETURN(NpyWriter writer, NpyWriter::Create(path, shape));
  RETURN_IF_ERROR(writer.Write(values));
  return writer.Close();
}

}  // namespace deltamesh
