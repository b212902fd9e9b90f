// Routed experts computed in this process, from the weights of an ExpertSet.
//
// Rows are grouped by expert, so that a step reads each touched expert's weights once. A row's bits
// do not depend on what it was grouped with: every kernel here gives each output element a chain of
// its own.
//
// Not thread-safe: one thread at a time, the one that may use the pool.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "runtime/base/thread_pool.h"
#include "runtime/expert/backend.h"
#include "runtime/expert/expert_set.h"

namespace deltamesh {

// One row to compute: `row` of the inputs through expert `expert`.
struct ExpertRow {
  int32_t row;
  int32_t expert;
};

class LocalExperts final : public ExpertBackend {
 public:
  // Both must outlive this object.
  LocalExperts(const ExpertSet* set, ThreadPool* pool) : set_(set), pool_(pool) {}

  // Computes everything before it returns, since the pool serves one caller at a time.
  absl::StatusOr<uint64_t> Start(const ExpertBatch& batch) override;
  absl::Status Finish(uint64_t ticket) override;

  // out[i] = expert rows[i].expert of `layer` applied to x[rows[i].row]; x is [*, width], out is
  // [rows.size(), width]. UNAVAILABLE when an expert is not held here; nothing is computed then.
  absl::Status Compute(int64_t layer, std::span<const ExpertRow> rows, const float* x, float* out);

 private:
  // Rows [begin, end) of `order_` all go to `expert`.
  struct Group {
    int32_t expert;
    int64_t begin, end;
  };

  // Quantises the rows of x that the experts of the grouped rows take, where they take them quantised.
  void QuantizeInputs(int64_t layer, std::span<const ExpertRow> rows, const float* x);
  absl::Status GroupRows(int64_t layer, std::span<const ExpertRow> rows);
  void RunWave(int64_t layer, std::span<const Group> wave, std::span<const ExpertRow> rows,
               const float* x, float* out);
  // Calls body(group, panel_begin, panel_end) over every panel of every group, in parallel.
  template <typename Body>
  void ForPanels(std::span<const Group> wave, int64_t panels, int64_t panel_macs, const Body& body);

  const ExpertSet* set_;
  ThreadPool* pool_;
  uint64_t next_ticket_ = 1;
  // Scratch; grows to the largest step and stays.
  std::vector<ExpertRow> batch_rows_;
  std::vector<int64_t> starts_;  // [experts + 1]
  std::vector<int64_t> order_;   // row indices, grouped by expert, ascending within a group
  std::vector<Group> groups_;
  std::vector<float> in_, gate_, up_, out_;
  // Whether the inputs of gate and up, and those of down, are quantised in the running call.
  bool narrow_in_ = false, narrow_mid_ = false;
  // Quantised rows (int8_activations.h): of x; gathered as in_ is; of gate_ after the activation.
  std::vector<std::byte> x_codes_, in_codes_, mid_codes_;
};

}  // namespace deltamesh
