// Turns stored matrices into packed ones: collects everything first, then packs in parallel into one
// arena or one file, or finds everything in a file that was packed before. Every value is checked
// while packing: one that is not finite ends it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/gemm/gemm.h"
#include "runtime/base/thread_pool.h"
#include "runtime/model/arena.h"
#include "runtime/model/checkpoint.h"
#include "runtime/model/load_options.h"
#include "runtime/model/packed_file.h"

namespace deltamesh {

// "DIR/file: tensor NAME: value [3, 4] is not finite" for the first such value of [begin, end) in
// row-major order; OK for types other than BF16 and F32.
absl::Status CheckFinite(const Checkpoint& checkpoint, const StoredTensor& tensor, int64_t begin,
                         int64_t end);

// Used by one thread. Targets must stay in place until Run returned; tensors as long as the
// checkpoint. Shapes and types must have been checked (CheckTensors).
class Packer {
 public:
  // `weights` is the width of all matrices but those of AddAsStored.
  Packer(const Checkpoint& checkpoint, WeightWidth weights)
      : checkpoint_(checkpoint), weights_(weights) {}

  // A whole [rows, cols] matrix.
  void Add(const StoredTensor& tensor, kernels::PackedMatrix* target);
  void AddAsStored(const StoredTensor& tensor, kernels::PackedMatrix* target);
  // Rows [row, row + rows) as a matrix of their own.
  void AddRows(const StoredTensor& tensor, int64_t row, int64_t rows,
               kernels::PackedMatrix* target);
  // The same rows transposed: a matrix of [cols, rows].
  void AddTransposed(const StoredTensor& tensor, int64_t row, int64_t rows,
                     kernels::PackedMatrix* target);
  void AddMxfp4(const StoredTensor& codes, const StoredTensor& scales,
                kernels::PackedMatrix* target);
  // Nothing is packed, the values are only checked.
  void AddCheck(const StoredTensor& tensor);

  // Packs everything; targets then point into the arena. `progress` may be null; it is called on
  // this thread with stored bytes done and in all.
  absl::StatusOr<Arena> Run(ThreadPool& pool,
                            const std::function<void(int64_t, int64_t)>& progress);

  // The matrices as entries of a file, in the order of adding.
  std::vector<PackedEntry> Entries() const;
  // Packs everything into a file of Entries(); targets stay as they are.
  absl::Status RunToFile(ThreadPool& pool, PackedFileWriter& writer,
                         const std::function<void(int64_t, int64_t)>& progress) const;
  // Checks everything added in the file, then points the targets into it, which must outlive them.
  // DATA_LOSS when a matrix is damaged, missing or of another shape.
  absl::Status Attach(ThreadPool& pool, const PackedFile& file,
                      const std::function<void(int64_t, int64_t)>& progress);
  int64_t packed_bytes() const;

 private:
  struct Job {
    std::string name;
    const StoredTensor* tensor = nullptr;
    const StoredTensor* scales = nullptr;  // MXFP4
    int64_t row = 0;                       // first stored row
    bool transposed = false;
    kernels::PackedMatrix packed;  // data is null until Run
    kernels::PackedMatrix* target = nullptr;
    int64_t offset = 0;  // in the arena
  };
  // Panels of one job: what one thread does at a time.
  struct Unit {
    const Job* job;
    int64_t panel_begin, panel_end;
    int64_t bytes;       // packed
    int64_t piece;       // number within the job
    int64_t job_number;  // among jobs that pack something
  };

  using UnitWork = std::function<absl::Status(const Unit&)>;

  kernels::WeightFormat FormatFor(const StoredTensor& tensor, int64_t cols) const;
  std::vector<Unit> CutUnits() const;
  // Does all units, some at a time; the first error in order ends it.
  absl::Status RunUnits(ThreadPool& pool, const std::function<void(int64_t, int64_t)>& progress,
                        const UnitWork& work) const;
  absl::Status PackUnit(const Unit& unit, std::byte* to) const;
  absl::Status PackFloats(const Unit& unit, std::byte* to) const;
  absl::Status PackMx(const Unit& unit, std::byte* to) const;

  const Checkpoint& checkpoint_;
  const WeightWidth weights_;
  std::vector<Job> jobs_;
};

}  // namespace deltamesh
