// Bytes of one stored file, wherever they lie: a file of a folder, an object of a bucket, memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "runtime/base/status.h"

namespace deltamesh {

// Not thread-safe unless an implementation says so.
class ByteReader {
 public:
  virtual ~ByteReader() = default;
  virtual int64_t size() const = 0;
  // Fills `pieces` one after the other with what lies at `offset`. OUT_OF_RANGE beyond the end.
  virtual absl::Status Read(int64_t offset, std::span<const std::span<std::byte>> pieces) = 0;

  absl::Status ReadOne(int64_t offset, std::span<std::byte> to) {
    const std::span<std::byte> one[] = {to};
    return Read(offset, one);
  }
};

using BytePieces = std::vector<std::span<const std::byte>>;

inline int64_t BytesOf(const BytePieces& pieces) {
  int64_t bytes = 0;
  for (const auto& piece : pieces) bytes += static_cast<int64_t>(piece.size());
  return bytes;
}

// What the pieces hold, one after the other. They must outlive it.
class PiecesReader final : public ByteReader {
 public:
  explicit PiecesReader(BytePieces pieces) : pieces_(std::move(pieces)), size_(BytesOf(pieces_)) {}
  int64_t size() const override { return size_; }
  absl::Status Read(int64_t offset, std::span<const std::span<std::byte>> to) override {
    for (const std::span<std::byte> piece : to) {
      if (!CopyOne(offset, piece)) {
        return absl::OutOfRangeError(
            absl::StrFormat("%d bytes at %d of %d", piece.size(), offset, size_));
      }
      offset += static_cast<int64_t>(piece.size());
    }
    return absl::OkStatus();
  }

 private:
  bool CopyOne(int64_t offset, std::span<std::byte> to) const {
    auto skip = static_cast<size_t>(offset);
    for (const auto& from : pieces_) {
      if (to.empty()) break;
      if (skip >= from.size()) {
        skip -= from.size();
        continue;
      }
      const size_t count = std::min(from.size() - skip, to.size());
      std::memcpy(to.data(), from.data() + skip, count);
      to = to.subspan(count);
      skip = 0;
    }
    return to.empty();
  }

  const BytePieces pieces_;
  const int64_t size_;
};

}  // namespace deltamesh
