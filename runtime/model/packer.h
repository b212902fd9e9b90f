// Turns stored matrices into packed ones: collects everything first, takes one arena, then packs in
// parallel. Every value is checked on the way: one that is not finite ends the load.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/gemm/gemm.h"
#include "runtime/base/thread_pool.h"
#include "runtime/model/arena.h"
#include "runtime/model/checkpoint.h"

namespace deltamesh {

// "DIR/file: tensor NAME: value [3, 4] is not finite" for the first such value of [begin, end) in
// row-major order; OK for types other than BF16 and F32.
absl::Status CheckFinite(const Checkpoint& checkpoint, const StoredTensor& tensor, int64_t begin,
                         int64_t end);

// Used by one thread. Targets must stay in place until Run returned; tensors as long as the
// checkpoint. Shapes and types must have been checked (CheckTensors).
class Packer {
 public:
  explicit Packer(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  // A whole [rows, cols] matrix.
  void Add(const StoredTensor& tensor, kernels::PackedMatrix* target);
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

 private:
  struct Job {
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
    int64_t bytes;  // stored
  };

  std::vector<Unit> CutUnits() const;
  absl::Status RunUnit(const Unit& unit, std::byte* arena) const;
  absl::Status PackFloats(const Unit& unit, std::byte* to) const;
  absl::Status PackMx(const Unit& unit, std::byte* to) const;

  const Checkpoint& checkpoint_;
  std::vector<Job> jobs_;
};

}  // namespace deltamesh
