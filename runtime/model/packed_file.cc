#include "runtime/model/packed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "runtime/base/crc32c.h"
#include "runtime/base/status.h"
#include "runtime/model/packed_prune.h"

namespace deltamesh {
namespace {

using kernels::kMxBlock;
using kernels::kPanel;
using kernels::PackedBytes;
using kernels::PackedMatrix;
using kernels::WeightFormat;

static_assert(std::endian::native == std::endian::little, "packed files are little-endian");

constexpr int64_t kPieceBytes = int64_t{2} << 20;
constexpr char kMagic[8] = {'D', 'M', 'P', 'A', 'C', 'K', 'E', 'D'};
constexpr mode_t kPackedMode = 0444;  // what is mapped and served is not to be changed in place
constexpr int64_t kNameBytesMax = 1024;
constexpr int64_t kDirectoryBytesMax = int64_t{1} << 30;
constexpr int64_t kSizeMax = int64_t{1} << 40;  // of rows and of columns

struct Header {
  char magic[8];
  uint32_t layout;
  uint32_t directory_crc;
  char digest[64];
  char width[16];
  int64_t file_bytes;
  int64_t directory_bytes;
  int64_t matrices;
  uint32_t reserved;
  uint32_t header_crc;  // of everything before it
};
static_assert(sizeof(Header) == 128 && sizeof(Header) <= kPackedPage);

uint32_t HeaderCrc(const Header& header) {
  return Crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, header_crc)));
}

template <size_t n>
void SetText(char (&field)[n], std::string_view text) {
  CHECK(text.size() <= n, "\"%s\" is longer than %d", text, n);
  std::memset(field, 0, n);
  std::memcpy(field, text.data(), text.size());
}

template <size_t n>
std::string GetText(const char (&field)[n]) {
  return {field, strnlen(field, n)};
}

int64_t RoundUp(int64_t bytes) { return (bytes + kPackedPage - 1) / kPackedPage * kPackedPage; }

template <typename T>
void Put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string DirectoryText(const std::vector<PackedEntry>& entries) {
  std::string out;
  for (const PackedEntry& e : entries) {
    Put(out, static_cast<uint32_t>(e.name.size()));
    Put(out, static_cast<uint32_t>(e.matrix.format));
    Put(out, e.matrix.rows);
    Put(out, e.matrix.cols);
    Put(out, e.offset);
    Put(out, static_cast<uint32_t>(e.pieces.size()));
    out += e.name;
    for (const uint32_t crc : e.pieces) Put(out, crc);
  }
  return out;
}

// Takes values off the front; a read beyond the end sets `failed` and gives zeros.
struct Cursor {
  std::span<const std::byte> rest;
  bool failed = false;

  std::span<const std::byte> Take(size_t size) {
    failed = failed || size > rest.size();
    if (failed) return {};
    const auto taken = rest.first(size);
    rest = rest.subspan(size);
    return taken;
  }
  template <typename T>
  T Get() {
    T value{};
    const auto bytes = Take(sizeof(T));
    if (!failed) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
};

bool ValidShape(const PackedMatrix& m, uint32_t format) {
  if (format > static_cast<uint32_t>(WeightFormat::kInt8)) return false;
  if (m.rows < 1 || m.rows > kSizeMax || m.cols < 1 || m.cols > kSizeMax / m.rows) return false;
  const bool grouped = m.format == WeightFormat::kMxfp4 || m.format == WeightFormat::kInt8;
  return !grouped || m.cols % kMxBlock == 0;
}

}  // namespace

std::string PackedKey::FileName() const {
  return absl::StrFormat("%s-%s-%d.packed", digest.substr(0, 16), width, kPackedLayout);
}

int64_t PiecePanels(const PackedMatrix& matrix) {
  return std::max<int64_t>(1, kPieceBytes / PackedBytes(matrix.format, kPanel, matrix.cols));
}

int64_t PieceCount(const PackedMatrix& matrix) {
  const int64_t step = PiecePanels(matrix);
  return (matrix.panels() + step - 1) / step;
}

PackedFile::~PackedFile() {
  if (!map_.empty()) munmap(const_cast<std::byte*>(map_.data()), map_.size());
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<std::shared_ptr<const PackedFile>> PackedFile::Open(const std::string& path,
                                                                   const PackedKey& key) {
  const int fd =
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would wait for a writer
  if (fd < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return NotFound("%s: is not there", path);
    return Unavailable("%s: cannot be opened (%s)", path, std::strerror(errno));
  }
  std::shared_ptr<PackedFile> file(new PackedFile);
  file->path_ = path;
  file->fd_ = fd;
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    return Unavailable("%s: is not a regular file; remove it", path);
  }
  if (!HoldPacked(fd)) return NotFound("%s: is being removed", path);
  const auto size = static_cast<int64_t>(info.st_size);
  if (size < kPackedPage) return DataLoss("%s: is not a packed file (%d bytes)", path, size);
  void* data = mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return ResourceExhausted("%s: mapping %d bytes failed (%s)", path, size, std::strerror(errno));
  }
  // Where the system has large pages for files they save address translation.
  madvise(data, static_cast<size_t>(size), MADV_HUGEPAGE);
  file->map_ = {static_cast<const std::byte*>(data), static_cast<size_t>(size)};
  RETURN_IF_ERROR(file->ReadHeader(key));
  return std::shared_ptr<const PackedFile>(std::move(file));
}

absl::Status PackedFile::ReadHeader(const PackedKey& key) {
  Header header;
  std::memcpy(&header, map_.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    return DataLoss("%s: is not a packed file (wrong magic)", path_);
  }
  if (header.layout != kPackedLayout) {
    return FailedPrecondition("%s: has layout %d, this program reads %d", path_, header.layout,
                              kPackedLayout);
  }
  if (header.header_crc != HeaderCrc(header)) return DataLoss("%s: its header is damaged", path_);
  if (GetText(header.digest) != key.digest || GetText(header.width) != key.width) {
    return FailedPrecondition("%s: holds model %s with %s weights, wanted is %s with %s", path_,
                              GetText(header.digest), GetText(header.width), key.digest, key.width);
  }
  if (header.file_bytes != std::ssize(map_)) {
    return DataLoss("%s: has %d bytes, its header says %d", path_, map_.size(), header.file_bytes);
  }
  if (header.directory_bytes < 0 || header.directory_bytes > kDirectoryBytesMax ||
      header.directory_bytes > std::ssize(map_) - kPackedPage) {
    return DataLoss("%s: a directory of %d bytes is impossible", path_, header.directory_bytes);
  }
  const auto directory = map_.subspan(kPackedPage, static_cast<size_t>(header.directory_bytes));
  if (Crc32c(directory) != header.directory_crc) {
    return DataLoss("%s: its directory is damaged", path_);
  }
  return ReadDirectory(directory, header.matrices);
}

absl::Status PackedFile::ReadDirectory(std::span<const std::byte> bytes, int64_t count) {
  Cursor in{bytes};
  for (int64_t i = 0; i < count && !in.failed; ++i) {
    PackedEntry e;
    const auto name_size = in.Get<uint32_t>();
    const auto format = in.Get<uint32_t>();
    e.matrix.rows = in.Get<int64_t>();
    e.matrix.cols = in.Get<int64_t>();
    e.matrix.format = static_cast<WeightFormat>(format);
    e.offset = in.Get<int64_t>();
    const auto pieces = in.Get<uint32_t>();
    if (in.failed || name_size > kNameBytesMax || !ValidShape(e.matrix, format) ||
        PieceCount(e.matrix) != pieces || e.offset < kPackedPage || e.offset % kPackedPage != 0 ||
        e.offset > std::ssize(map_) || e.bytes() > std::ssize(map_) - e.offset) {
      return DataLoss("%s: entry %d of its directory is impossible", path_, i);
    }
    const auto name = in.Take(name_size);
    e.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
    const auto crcs = in.Take(size_t{pieces} * sizeof(uint32_t));
    if (in.failed) break;
    e.pieces.resize(pieces);
    std::memcpy(e.pieces.data(), crcs.data(), crcs.size());
    entries_.push_back(std::move(e));
  }
  if (in.failed || !in.rest.empty()) {
    return DataLoss("%s: its directory does not hold %d matrices", path_, count);
  }
  for (size_t i = 0; i < entries_.size(); ++i) by_name_.emplace(entries_[i].name, i);
  return absl::OkStatus();
}

const PackedEntry* PackedFile::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

absl::Status PackedFile::CheckPiece(const PackedEntry& entry, int64_t piece) const {
  const PackedMatrix& m = entry.matrix;
  const int64_t step = PiecePanels(m), begin = piece * step;
  const int64_t end = std::min(begin + step, m.panels());
  const int64_t at = PackedBytes(m.format, begin * kPanel, m.cols);
  const int64_t size = PackedBytes(m.format, (end - begin) * kPanel, m.cols);
  if (Crc32c({data(entry) + at, static_cast<size_t>(size)}) ==
      entry.pieces[static_cast<size_t>(piece)]) {
    return absl::OkStatus();
  }
  return DataLoss("%s: matrix %s is damaged in bytes %d to %d", path_, entry.name,
                  entry.offset + at, entry.offset + at + size);
}

int64_t PackedFileWriter::Place(std::vector<PackedEntry>& entries) {
  for (PackedEntry& e : entries) e.pieces.resize(static_cast<size_t>(PieceCount(e.matrix)));
  int64_t at = RoundUp(kPackedPage + std::ssize(DirectoryText(entries)));
  for (PackedEntry& e : entries) {
    e.offset = at;
    at = RoundUp(at + e.bytes());
  }
  return at;
}

absl::StatusOr<std::unique_ptr<PackedFileWriter>> PackedFileWriter::Create(
    const std::string& path, const PackedKey& key, std::vector<PackedEntry> entries) {
  std::unique_ptr<PackedFileWriter> writer(new PackedFileWriter);
  writer->path_ = path;
  writer->partial_ = absl::StrFormat("%s.%d.partial", path, getpid());
  writer->key_ = key;
  writer->bytes_ = Place(entries);
  writer->entries_ = std::move(entries);
  writer->fd_ = open(writer->partial_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (writer->fd_ < 0) {
    return Unavailable("%s: cannot be created (%s)", writer->partial_, std::strerror(errno));
  }
  if (const int error = posix_fallocate(writer->fd_, 0, writer->bytes_); error != 0) {
    return ResourceExhausted("%s: no room for %d bytes (%s)%s", writer->partial_, writer->bytes_,
                             std::strerror(error),
                             error == EFBIG ? "; raise the largest file size (ulimit -f)" : "");
  }
  const auto size = static_cast<size_t>(writer->bytes_);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, writer->fd_, 0);
  if (data == MAP_FAILED) {
    return ResourceExhausted("%s: mapping %d bytes failed (%s)", writer->partial_, writer->bytes_,
                             std::strerror(errno));
  }
  // Pieces written one by one would leave the page cache in small pages, and all readers with them.
  madvise(data, size, MADV_HUGEPAGE);
  writer->map_ = {static_cast<std::byte*>(data), size};
  return writer;
}

PackedFileWriter::~PackedFileWriter() {
  Unmap();
  if (fd_ < 0) return;
  close(fd_);
  unlink(partial_.c_str());
}

void PackedFileWriter::Unmap() {
  if (!map_.empty()) munmap(map_.data(), map_.size());
  map_ = {};
}

void PackedFileWriter::WriteAt(int64_t offset, std::span<const std::byte> bytes) const {
  CHECK(offset >= 0 && offset <= std::ssize(map_) - std::ssize(bytes), "%d bytes at %d of %d",
        bytes.size(), offset, map_.size());
  std::memcpy(map_.data() + offset, bytes.data(), bytes.size());
}

void PackedFileWriter::Write(int64_t entry, int64_t piece, std::span<const std::byte> bytes) {
  PackedEntry& e = entries_[static_cast<size_t>(entry)];
  e.pieces[static_cast<size_t>(piece)] = Crc32c(bytes);
  const int64_t row = piece * PiecePanels(e.matrix) * kPanel;
  WriteAt(e.offset + PackedBytes(e.matrix.format, row, e.matrix.cols), bytes);
}

absl::Status PackedFileWriter::Finish() {
  const std::string directory = DirectoryText(entries_);
  const auto directory_bytes = std::as_bytes(std::span(directory));
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.layout = kPackedLayout;
  header.directory_crc = Crc32c(directory_bytes);
  SetText(header.digest, key_.digest);
  SetText(header.width, key_.width);
  header.file_bytes = bytes_;
  header.directory_bytes = std::ssize(directory);
  header.matrices = std::ssize(entries_);
  header.header_crc = HeaderCrc(header);
  WriteAt(kPackedPage, directory_bytes);
  WriteAt(0, std::as_bytes(std::span(&header, 1)));
  Unmap();
  if (fchmod(fd_, kPackedMode) != 0 || fsync(fd_) != 0 ||
      std::rename(partial_.c_str(), path_.c_str()) != 0) {
    return Unavailable("%s: cannot become %s (%s)", partial_, path_, std::strerror(errno));
  }
  close(fd_);
  fd_ = -1;
  // The new name must survive a crash too; where folders cannot be synced it does so a little later.
  const int folder = open(path_.substr(0, path_.rfind('/') + 1).c_str(), O_RDONLY | O_DIRECTORY);
  if (folder >= 0) {
    fsync(folder);
    close(folder);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
