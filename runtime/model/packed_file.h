// One file of packed matrices: written once, then mapped read-only by every process of a machine,
// which so share its pages.
//
//   header     [0, 4096): magic, layout, key, sizes, checksums of the directory and of itself
//   directory  per matrix its name, format, shape, offset and the CRC32C of each of its pieces
//   matrices   each at a multiple of 4096, in the layout of gemm.h
//
// A piece is a run of whole panels of about 2 MiB: the unit of packing, of writing and of checking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/gemm/gemm.h"

namespace deltamesh {

inline constexpr int64_t kPackedPage = 4096;
// Raised with every change of what packed bytes mean, so that files of other builds are refused.
inline constexpr uint32_t kPackedLayout = 2;

// What the bytes of a file follow from, besides the layout.
struct PackedKey {
  std::string digest;  // SourceDigest of the checkpoint, 64 hex digits
  std::string width;   // WeightWidthName
  std::string FileName() const;
};

struct PackedEntry {
  std::string name;
  kernels::PackedMatrix matrix;  // its data is null
  int64_t offset = 0;            // in the file
  std::vector<uint32_t> pieces;  // CRC32C of each

  int64_t bytes() const { return kernels::PackedBytes(matrix.format, matrix.rows, matrix.cols); }
};

// Pieces of a matrix: piece i holds panels [i * step, min((i + 1) * step, panels)).
int64_t PiecePanels(const kernels::PackedMatrix& matrix);
int64_t PieceCount(const kernels::PackedMatrix& matrix);

// Immutable; threads may share it. A file must not be changed in place while it is mapped, which its mode
// forbids; replacing it by rename is safe.
class PackedFile {
 public:
  // NOT_FOUND when there is none; FAILED_PRECONDITION when it is of another model, width or layout;
  // DATA_LOSS when it is damaged or cut short. Matrices are not looked at yet.
  static absl::StatusOr<std::shared_ptr<const PackedFile>> Open(const std::string& path,
                                                                const PackedKey& key);
  ~PackedFile();
  PackedFile(const PackedFile&) = delete;
  PackedFile& operator=(const PackedFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<PackedEntry>& entries() const { return entries_; }
  const PackedEntry* Find(std::string_view name) const;  // null when there is no such matrix
  const std::byte* data(const PackedEntry& entry) const { return map_.data() + entry.offset; }
  // DATA_LOSS names file, matrix and piece.
  absl::Status CheckPiece(const PackedEntry& entry, int64_t piece) const;

 private:
  PackedFile() = default;
  absl::Status ReadHeader(const PackedKey& key);
  absl::Status ReadDirectory(std::span<const std::byte> bytes, int64_t count);

  std::string path_;
  int fd_ = -1;  // open as long as the file is mapped: it holds the lock (packed_prune.h)
  std::span<const std::byte> map_;
  std::vector<PackedEntry> entries_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

// Writes a file under a temporary name and gives it its own at the end, so that no reader ever sees
// half of it. Write is thread-safe, the rest is for one thread.
class PackedFileWriter {
 public:
  // Where a file of these entries would end, hence its size; sets their offsets.
  static int64_t Place(std::vector<PackedEntry>& entries);

  // Takes all its room at once; RESOURCE_EXHAUSTED when the disk has not enough.
  static absl::StatusOr<std::unique_ptr<PackedFileWriter>> Create(const std::string& path,
                                                                  const PackedKey& key,
                                                                  std::vector<PackedEntry> entries);
  ~PackedFileWriter();  // removes what was not finished
  PackedFileWriter(const PackedFileWriter&) = delete;
  PackedFileWriter& operator=(const PackedFileWriter&) = delete;

  void Write(int64_t entry, int64_t piece, std::span<const std::byte> bytes);
  // All pieces must have been written. On disk and read-only when it returns; UNAVAILABLE when the disk
  // failed.
  absl::Status Finish();

  // For `build` to call with bytes done and in all; may be null.
  std::function<void(int64_t, int64_t)> on_progress;

 private:
  PackedFileWriter() = default;
  void WriteAt(int64_t offset, std::span<const std::byte> bytes) const;
  void Unmap();

  std::string path_, partial_;
  PackedKey key_;
  std::vector<PackedEntry> entries_;
  std::span<std::byte> map_;  // of the whole file
  int64_t bytes_ = 0;
  int fd_ = -1;
};

}  // namespace deltamesh
