#include "runtime/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/model/json_reader.h"

namespace deltamesh {
namespace {

using nlohmann::json;

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<DTypeInfo, 11> kDTypes = {{{DType::kF64, "F64", 8},
                                                {DType::kF32, "F32", 4},
                                                {DType::kF16, "F16", 2},
                                                {DType::kBf16, "BF16", 2},
                                                {DType::kI64, "I64", 8},
                                                {DType::kI32, "I32", 4},
                                                {DType::kI16, "I16", 2},
                                                {DType::kI8, "I8", 1},
                                                {DType::kU8, "U8", 1},
                                                {DType::kBool, "BOOL", 1},
                                                {DType::kF8E8M0, "F8_E8M0", 1}}};

constexpr int64_t kPrefixBytes = 8;                      // little-endian length of the header
constexpr int64_t kHeaderBytesMax = int64_t{100} << 20;  // the format's own bound
constexpr int64_t kRankMax = 8;

const DTypeInfo& Info(DType dtype) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype == dtype) return info;
  }
  CHECK(false, "no such dtype: %d", static_cast<int>(dtype));
}

// One header entry before it is turned into a view.
struct Entry {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;
};

absl::StatusOr<std::vector<int64_t>> ReadSizes(const json& value, std::string_view where,
                                               std::string_view key) {
  if (!value.is_array()) return InvalidArgument("%s: %s is not a list", where, key);
  std::vector<int64_t> sizes;
  for (const json& item : value) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() > uint64_t{1} << 62) {
      return InvalidArgument("%s: %s holds %s, which is no size", where, key,
                             item.dump(-1, ' ', true, json::error_handler_t::replace));
    }
    sizes.push_back(item.get<int64_t>());
  }
  return sizes;
}

// Bytes of the shape, or an error when the product leaves 62 bits.
absl::StatusOr<int64_t> ShapeBytes(const Entry& entry, std::string_view where) {
  int64_t bytes = Info(entry.dtype).bytes;
  for (const int64_t size : entry.shape) {
    if (size != 0 && bytes > (int64_t{1} << 62) / size) {
      return InvalidArgument("%s: shape %s is impossibly large", where, ShapeText(entry.shape));
    }
    bytes *= size;
  }
  return bytes;
}

absl::StatusOr<Entry> ReadEntry(const json& value, const std::string& where) {
  JsonReader reader(value, where, "");
  const std::string dtype = reader.String("dtype");
  const json* shape = reader.Find("shape");
  const json* offsets = reader.Find("data_offsets");
  RETURN_IF_ERROR(reader.status());
  if (shape == nullptr || offsets == nullptr) {
    return InvalidArgument("%s: shape or data_offsets is missing in the header", where);
  }
  Entry entry;
  const auto known = std::find_if(kDTypes.begin(), kDTypes.end(),
                                  [&](const DTypeInfo& info) { return info.name == dtype; });
  if (known == kDTypes.end()) return InvalidArgument("%s: dtype \"%s\" is unknown", where, dtype);
  entry.dtype = known->dtype;
  ASSIGN_OR_RETURN(entry.shape, ReadSizes(*shape, where, "shape"));
  if (std::ssize(entry.shape) > kRankMax) {
    return InvalidArgument("%s: %d dimensions are more than %d", where, entry.shape.size(),
                           kRankMax);
  }
  ASSIGN_OR_RETURN(const std::vector<int64_t> range, ReadSizes(*offsets, where, "data_offsets"));
  if (range.size() != 2 || range[0] > range[1]) {
    return InvalidArgument("%s: data_offsets %s is not [begin, end]", where, ShapeText(range));
  }
  entry.begin = range[0];
  entry.end = range[1];
  ASSIGN_OR_RETURN(const int64_t bytes, ShapeBytes(entry, where));
  if (bytes != entry.end - entry.begin) {
    return InvalidArgument("%s: %s %s takes %d bytes, data_offsets gives it %d", where,
                           Info(entry.dtype).name, ShapeText(entry.shape), bytes,
                           entry.end - entry.begin);
  }
  return entry;
}

absl::Status CheckOverlap(const std::map<std::string, Entry>& entries, const std::string& path) {
  std::vector<std::pair<const std::string*, const Entry*>> order;
  for (const auto& [name, entry] : entries) {
    if (entry.begin < entry.end) order.emplace_back(&name, &entry);
  }
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.second->begin < b.second->begin; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i].second->begin < order[i - 1].second->end) {
      return InvalidArgument("%s: tensor %s overlaps tensor %s", path, *order[i].first,
                             *order[i - 1].first);
    }
  }
  return absl::OkStatus();
}

std::string VersionOf(const struct stat& info) {
  return absl::StrFormat("%d %d.%09d %d.%09d", info.st_size, info.st_mtim.tv_sec,
                         info.st_mtim.tv_nsec, info.st_ctim.tv_sec, info.st_ctim.tv_nsec);
}

struct Mapped {
  std::span<const std::byte> bytes;
  std::string version;
};

absl::StatusOr<Mapped> MapFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return NotFound("%s: cannot be opened (%s); the checkpoint is incomplete", path,
                    std::strerror(errno));
  }
  struct stat info {};
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  const int64_t size = regular ? static_cast<int64_t>(info.st_size) : 0;
  if (!regular || size < kPrefixBytes) {
    close(fd);
    if (!regular) return InvalidArgument("%s: is not a regular file", path);
    return DataLoss("%s: %d bytes are too few for a safetensors file; fetch it again", path, size);
  }
  void* data = mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (data == MAP_FAILED) {
    return ResourceExhausted("%s: mapping %d bytes failed (%s)", path, size, std::strerror(errno));
  }
  return Mapped{std::span(static_cast<const std::byte*>(data), static_cast<size_t>(size)),
                VersionOf(info)};
}

}  // namespace

int64_t DTypeBytes(DType dtype) { return Info(dtype).bytes; }
std::string_view DTypeName(DType dtype) { return Info(dtype).name; }

int64_t TensorView::elements() const {
  return static_cast<int64_t>(bytes.size()) / DTypeBytes(dtype);
}

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

SafetensorsFile::~SafetensorsFile() {
  if (!file_.empty()) munmap(const_cast<std::byte*>(file_.data()), file_.size());
}

void SafetensorsFile::ReleasePages() const {
  madvise(const_cast<std::byte*>(file_.data()), file_.size(), MADV_DONTNEED);
}

absl::StatusOr<std::shared_ptr<const SafetensorsFile>> SafetensorsFile::Open(
    const std::string& path) {
  std::shared_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  ASSIGN_OR_RETURN(Mapped mapped, MapFile(path));
  file->file_ = mapped.bytes;
  file->version_ = std::move(mapped.version);
  RETURN_IF_ERROR(file->ParseHeader());
  return std::shared_ptr<const SafetensorsFile>(std::move(file));
}

absl::Status SafetensorsFile::CheckUnchanged() const {
  struct stat info {};
  if (stat(path_.c_str(), &info) == 0 && VersionOf(info) == version_) return absl::OkStatus();
  return FailedPrecondition(
      "%s: was changed while it was read; load it again when nobody writes it", path_);
}

absl::Status SafetensorsFile::ParseHeader() {
  uint64_t length = 0;
  static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");
  std::memcpy(&length, file_.data(), sizeof(length));
  if (length > kHeaderBytesMax) {
    return InvalidArgument("%s: header length %d is beyond %d; not a safetensors file", path_,
                           length, kHeaderBytesMax);
  }
  if (length > file_.size() - kPrefixBytes) {
    return DataLoss(
        "%s: header of %d bytes does not fit %d bytes; the file is cut short, fetch it again",
        path_, length, file_.size());
  }
  const std::string_view text(reinterpret_cast<const char*>(file_.data()) + kPrefixBytes, length);
  ASSIGN_OR_RETURN(const json header, ParseStrictJson(text, path_ + ": header"));
  if (!header.is_object()) return InvalidArgument("%s: header is not a JSON object", path_);

  const std::span<const std::byte> data = file_.subspan(kPrefixBytes + length);
  std::map<std::string, Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    ASSIGN_OR_RETURN(Entry entry, ReadEntry(value, path_ + ": tensor " + name));
    if (entry.end > std::ssize(data)) {
      return DataLoss(
          "%s: tensor %s ends at byte %d, the file holds %d; it is cut short, fetch it again",
          path_, name, entry.end, data.size());
    }
    entries.emplace(name, std::move(entry));
  }
  RETURN_IF_ERROR(CheckOverlap(entries, path_));
  for (auto& [name, entry] : entries) {
    tensors_[name] = {entry.dtype, std::move(entry.shape),
                      data.subspan(static_cast<size_t>(entry.begin),
                                   static_cast<size_t>(entry.end - entry.begin))};
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
