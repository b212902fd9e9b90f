#include "runtime/model/packer.h"

#include <algorithm>
#include <cstring>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

using kernels::kMxBlock;
using kernels::kPanel;
using kernels::PackedBytes;
using kernels::PackedMatrix;
using kernels::WeightFormat;

constexpr int64_t kAlignment = 64;
constexpr int64_t kBatchBytes = int64_t{256} << 20;  // packed bytes between two progress reports
// The largest E8M0 scale with which the largest magnitude, 6, is still a finite float.
constexpr uint8_t kScaleMax = 252;

WeightFormat FormatOf(const StoredTensor& tensor) {
  if (tensor.view.dtype == DType::kBf16) return WeightFormat::kBf16;
  CHECK(tensor.view.dtype == DType::kF32, "%s: not a float tensor", tensor.full_name);
  return WeightFormat::kF32;
}

int64_t ColumnsOf(const StoredTensor& tensor) {
  CHECK(tensor.view.shape.size() == 2, "%s: not a matrix", tensor.full_name);
  return tensor.view.shape[1];
}

std::string Place(const Checkpoint& checkpoint, const StoredTensor& tensor) {
  return absl::StrFormat("%s/%s: tensor %s", checkpoint.folder(), tensor.file, tensor.full_name);
}

// "[3, 4]" of the flat index.
std::string IndexText(const StoredTensor& tensor, int64_t flat) {
  std::vector<int64_t> index(tensor.view.shape.size());
  for (size_t d = index.size(); d-- > 0;) {
    index[d] = flat % tensor.view.shape[d];
    flat /= tensor.view.shape[d];
  }
  return ShapeText(index);
}

// Flat index of the first value whose exponent bits are all ones, or `end`.
template <typename T>
int64_t FirstNonFinite(const std::byte* data, int64_t begin, int64_t end, T exponent) {
  constexpr int64_t kRun = 1024;  // a run is judged at once, which the compiler vectorises
  T values[kRun];
  for (int64_t i = begin; i < end; i += kRun) {
    const int64_t n = std::min(kRun, end - i);
    std::memcpy(values, data + i * static_cast<int64_t>(sizeof(T)),
                static_cast<size_t>(n) * sizeof(T));
    int64_t bad = 0;
    for (int64_t j = 0; j < n; ++j) bad += (values[j] & exponent) == exponent;
    if (bad == 0) continue;
    for (int64_t j = 0; j < n; ++j) {
      if ((values[j] & exponent) == exponent) return i + j;
    }
  }
  return end;
}

// to[c][r] = stored[row + r][first + c] for elements of sizeof(T) bytes.
template <typename T>
std::vector<T> Transposed(const std::byte* data, int64_t stride, int64_t row, int64_t rows,
                          int64_t first, int64_t count) {
  std::vector<T> to(static_cast<size_t>(count * rows));
  for (int64_t r = 0; r < rows; ++r) {
    const std::byte* from = data + ((row + r) * stride + first) * static_cast<int64_t>(sizeof(T));
    for (int64_t c = 0; c < count; ++c)
      std::memcpy(&to[c * rows + r], from + c * sizeof(T), sizeof(T));
  }
  return to;
}

template <typename T>
std::vector<T> Aligned(const std::byte* data, int64_t count) {
  std::vector<T> copy(static_cast<size_t>(count));
  std::memcpy(copy.data(), data, copy.size() * sizeof(T));
  return copy;
}

// `source` holds dense rows of `stored` elements.
void PackAll(WeightFormat format, WeightFormat stored, int64_t rows, int64_t cols,
             const void* source, std::byte* to) {
  kernels::PackParams p;
  p.format = stored;
  p.rows = rows;
  p.cols = cols;
  p.row_stride = cols;
  p.source = source;
  p.packed = to;
  p.panel_begin = 0;
  p.panel_end = (rows + kPanel - 1) / kPanel;
  if (format == WeightFormat::kInt8) {
    kernels::PackInt8(p);
  } else {
    kernels::Pack(p);
  }
}

}  // namespace

absl::Status CheckFinite(const Checkpoint& checkpoint, const StoredTensor& tensor, int64_t begin,
                         int64_t end) {
  const std::byte* data = tensor.view.bytes.data();
  int64_t bad = end;
  if (tensor.view.dtype == DType::kBf16) bad = FirstNonFinite<uint16_t>(data, begin, end, 0x7F80);
  if (tensor.view.dtype == DType::kF32)
    bad = FirstNonFinite<uint32_t>(data, begin, end, 0x7F800000);
  if (bad == end) return absl::OkStatus();
  return InvalidArgument("%s: value %s is not finite; fetch the file again",
                         Place(checkpoint, tensor), IndexText(tensor, bad));
}

void Packer::Add(const StoredTensor& tensor, PackedMatrix* target) {
  AddRows(tensor, 0, tensor.view.shape[0], target);
}

void Packer::AddAsStored(const StoredTensor& tensor, PackedMatrix* target) {
  AddRows(tensor, 0, tensor.view.shape[0], target);
  jobs_.back().packed.format = FormatOf(tensor);
}

WeightFormat Packer::FormatFor(const StoredTensor& tensor, int64_t cols) const {
  return weights_ == WeightWidth::k8bit && cols % kMxBlock == 0 ? WeightFormat::kInt8
                                                                : FormatOf(tensor);
}

void Packer::AddRows(const StoredTensor& tensor, int64_t row, int64_t rows, PackedMatrix* target) {
  Job job;
  job.name = tensor.name;
  if (rows != tensor.view.shape[0]) job.name += absl::StrFormat(" [%d, %d)", row, row + rows);
  job.tensor = &tensor;
  job.row = row;
  job.packed = {FormatFor(tensor, ColumnsOf(tensor)), rows, ColumnsOf(tensor), nullptr};
  job.target = target;
  jobs_.push_back(job);
}

void Packer::AddTransposed(const StoredTensor& tensor, int64_t row, int64_t rows,
                           PackedMatrix* target) {
  Job job;
  job.name = absl::StrFormat("%s [%d, %d) transposed", tensor.name, row, row + rows);
  job.tensor = &tensor;
  job.row = row;
  job.transposed = true;
  job.packed = {FormatFor(tensor, rows), ColumnsOf(tensor), rows, nullptr};
  job.target = target;
  jobs_.push_back(job);
}

void Packer::AddMxfp4(const StoredTensor& codes, const StoredTensor& scales, PackedMatrix* target) {
  Job job;
  job.name = codes.name;
  job.tensor = &codes;
  job.scales = &scales;
  job.packed = {WeightFormat::kMxfp4, codes.view.shape[0], 2 * ColumnsOf(codes), nullptr};
  job.target = target;
  jobs_.push_back(job);
}

void Packer::AddCheck(const StoredTensor& tensor) {
  Job job;
  job.tensor = &tensor;
  job.packed = {FormatOf(tensor), tensor.view.shape[0], ColumnsOf(tensor), nullptr};
  jobs_.push_back(job);
}

std::vector<Packer::Unit> Packer::CutUnits() const {
  std::vector<Unit> units;
  int64_t number = 0;
  for (const Job& job : jobs_) {
    const int64_t panel_bytes = PackedBytes(job.packed.format, kPanel, job.packed.cols);
    const int64_t step = PiecePanels(job.packed);
    for (int64_t p = 0; p < job.packed.panels(); p += step) {
      const int64_t end = std::min(p + step, job.packed.panels());
      units.push_back({&job, p, end, (end - p) * panel_bytes, p / step, number});
    }
    if (job.target != nullptr) ++number;
  }
  return units;
}

absl::Status Packer::PackFloats(const Unit& unit, std::byte* to) const {
  const Job& job = *unit.job;
  const StoredTensor& tensor = *job.tensor;
  const int64_t element = DTypeBytes(tensor.view.dtype);
  const int64_t first = unit.panel_begin * kPanel;
  const int64_t count = std::min(unit.panel_end * kPanel, job.packed.rows) - first;
  const int64_t cols = job.packed.cols;
  const std::byte* data = tensor.view.bytes.data();
  if (job.transposed) {
    const int64_t stride = tensor.view.shape[1];
    RETURN_IF_ERROR(CheckFinite(checkpoint_, tensor, job.row * stride, (job.row + cols) * stride));
    if (element == 2) {
      const auto part = Transposed<uint16_t>(data, stride, job.row, cols, first, count);
      PackAll(job.packed.format, FormatOf(tensor), count, cols, part.data(), to);
    } else {
      const auto part = Transposed<float>(data, stride, job.row, cols, first, count);
      PackAll(job.packed.format, FormatOf(tensor), count, cols, part.data(), to);
    }
    return absl::OkStatus();
  }
  const int64_t begin = (job.row + first) * cols;
  RETURN_IF_ERROR(CheckFinite(checkpoint_, tensor, begin, begin + count * cols));
  if (job.target == nullptr) return absl::OkStatus();
  const std::byte* source = data + begin * element;
  if (reinterpret_cast<uintptr_t>(source) % static_cast<uintptr_t>(element) == 0) {
    PackAll(job.packed.format, FormatOf(tensor), count, cols, source, to);
  } else if (element == 2) {
    PackAll(job.packed.format, FormatOf(tensor), count, cols,
            Aligned<uint16_t>(source, count * cols).data(), to);
  } else {
    PackAll(job.packed.format, FormatOf(tensor), count, cols,
            Aligned<float>(source, count * cols).data(), to);
  }
  return absl::OkStatus();
}

absl::Status Packer::PackMx(const Unit& unit, std::byte* to) const {
  const Job& job = *unit.job;
  const int64_t first = unit.panel_begin * kPanel;
  const int64_t count = std::min(unit.panel_end * kPanel, job.packed.rows) - first;
  const int64_t cols = job.packed.cols;
  const auto* codes = reinterpret_cast<const uint8_t*>(job.tensor->view.bytes.data());
  const auto* scales = reinterpret_cast<const uint8_t*>(job.scales->view.bytes.data());
  const int64_t per_row = cols / kMxBlock;
  for (int64_t i = first * per_row; i < (first + count) * per_row; ++i) {
    if (scales[i] <= kScaleMax) continue;
    return InvalidArgument("%s: scale %s is %d, %s; fetch the file again",
                           Place(checkpoint_, *job.scales), IndexText(*job.scales, i), scales[i],
                           scales[i] == 255 ? "which means NaN" : "beyond the range of float32");
  }
  kernels::PackMxfp4Params p;
  p.rows = count;
  p.cols = cols;
  p.codes = codes + first * (cols / 2);
  p.scales = scales + first * per_row;
  p.packed = to;
  p.panel_begin = 0;
  p.panel_end = unit.panel_end - unit.panel_begin;
  kernels::PackMxfp4(p);
  return absl::OkStatus();
}

absl::Status Packer::PackUnit(const Unit& unit, std::byte* to) const {
  return unit.job->packed.format == WeightFormat::kMxfp4 ? PackMx(unit, to) : PackFloats(unit, to);
}

absl::Status Packer::RunUnits(ThreadPool& pool,
                              const std::function<void(int64_t, int64_t)>& progress,
                              const UnitWork& work) const {
  const std::vector<Unit> units = CutUnits();
  int64_t total = 0, done = 0;
  for (const Unit& unit : units) total += unit.bytes;
  std::vector<absl::Status> results(units.size());
  for (size_t begin = 0, end = 0; begin < units.size(); begin = end) {
    for (int64_t batch = 0; end < units.size() && batch < kBatchBytes; ++end) {
      batch += units[end].bytes;
      done += units[end].bytes;
    }
    pool.ParallelFor(static_cast<int64_t>(end - begin), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) results[begin + i] = work(units[begin + i]);
    });
    for (size_t i = begin; i < end; ++i) RETURN_IF_ERROR(results[i]);
    if (progress) progress(done, total);
  }
  return absl::OkStatus();
}

absl::StatusOr<Arena> Packer::Run(ThreadPool& pool,
                                  const std::function<void(int64_t, int64_t)>& progress) {
  int64_t size = 0;
  for (Job& job : jobs_) {
    if (job.target == nullptr) continue;
    job.offset = size;
    size += PackedBytes(job.packed.format, job.packed.rows, job.packed.cols);
    size = (size + kAlignment - 1) / kAlignment * kAlignment;
  }
  ASSIGN_OR_RETURN(Arena arena, Arena::Create(size));
  for (Job& job : jobs_) {
    if (job.target == nullptr) continue;
    *job.target = job.packed;
    job.target->data = arena.data() + job.offset;
  }
  RETURN_IF_ERROR(RunUnits(pool, progress, [&](const Unit& unit) {
    // Panels follow each other, so the panels in front are as large as a matrix of their rows.
    const PackedMatrix& packed = unit.job->packed;
    return PackUnit(unit, arena.data() + unit.job->offset +
                              PackedBytes(packed.format, unit.panel_begin * kPanel, packed.cols));
  }));
  return arena;
}

std::vector<PackedEntry> Packer::Entries() const {
  std::vector<PackedEntry> entries;
  for (const Job& job : jobs_) {
    if (job.target == nullptr) continue;
    PackedEntry entry;
    entry.name = job.name;
    entry.matrix = job.packed;
    entries.push_back(std::move(entry));
  }
  return entries;
}

int64_t Packer::packed_bytes() const {
  int64_t bytes = 0;
  for (const Job& job : jobs_) {
    if (job.target == nullptr) continue;
    bytes += PackedBytes(job.packed.format, job.packed.rows, job.packed.cols);
  }
  return bytes;
}

absl::Status Packer::RunToFile(ThreadPool& pool, PackedFileWriter& writer,
                               const std::function<void(int64_t, int64_t)>& progress) const {
  return RunUnits(
      pool,
      [&](int64_t done, int64_t all) {
        if (progress) progress(done, all);
        if (writer.on_progress) writer.on_progress(done, all);
      },
      [&](const Unit& unit) -> absl::Status {
        if (unit.job->target == nullptr) return PackUnit(unit, nullptr);
        std::vector<std::byte> buffer(static_cast<size_t>(unit.bytes));
        RETURN_IF_ERROR(PackUnit(unit, buffer.data()));
        writer.Write(unit.job_number, unit.piece, buffer);
        return absl::OkStatus();
      });
}

absl::Status Packer::Attach(ThreadPool& pool, const PackedFile& file,
                            const std::function<void(int64_t, int64_t)>& progress) {
  std::vector<const PackedEntry*> found;  // by job number
  for (const Job& job : jobs_) {
    if (job.target == nullptr) continue;
    const PackedEntry* entry = file.Find(job.name);
    if (entry == nullptr || entry->matrix.format != job.packed.format ||
        entry->matrix.rows != job.packed.rows || entry->matrix.cols != job.packed.cols) {
      return DataLoss("%s: matrix %s of %d x %d is missing or of another shape", file.path(),
                      job.name, job.packed.rows, job.packed.cols);
    }
    found.push_back(entry);
  }
  RETURN_IF_ERROR(RunUnits(pool, progress, [&](const Unit& unit) {
    // Values that are only checked were checked when the file was packed.
    if (unit.job->target == nullptr) return absl::OkStatus();
    return file.CheckPiece(*found[static_cast<size_t>(unit.job_number)], unit.piece);
  }));
  auto entry = found.begin();
  for (Job& job : jobs_) {
    if (job.target == nullptr) continue;
    *job.target = job.packed;
    job.target->data = file.data(**entry++);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
