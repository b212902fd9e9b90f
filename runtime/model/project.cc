#include "runtime/model/project.h"

#include <algorithm>

#include "kernels/gemm/int8_activations.h"

namespace deltamesh {

namespace {
// Below this many multiply-adds waking a thread costs more than it saves.
constexpr int64_t kMinWork = 64 * 1024;
// Multiply-adds that quantising one value takes as long as.
constexpr int64_t kQuantizeCost = 16;

// Quantises what the projections want quantised; returns for each of them its rows, or null.
const std::byte** QuantizeInputs(const Step& step, int64_t tokens,
                                 std::span<const Projection> projections) {
  Workspace& ws = step.workspace;
  const auto count = static_cast<int64_t>(projections.size());
  const auto** rows = ws.Take<const std::byte*>(count);
  std::fill_n(rows, count, nullptr);
  if (!step.int8) return rows;
  auto* jobs = ws.Take<kernels::QuantizeParams>(count);
  int64_t inputs = 0, values = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Projection& p = projections[static_cast<size_t>(i)];
    if (!kernels::TakesInt8(p.w.format)) continue;
    const kernels::QuantizeParams* last = inputs > 0 ? &jobs[inputs - 1] : nullptr;
    if (last == nullptr || last->x != p.x || last->x_stride != p.x_stride ||
        last->cols != p.w.cols) {
      jobs[inputs++] = {.x = p.x,
                        .x_stride = p.x_stride,
                        .rows = ws.Take<std::byte>(tokens * kernels::Int8RowBytes(p.w.cols)),
                        .tokens = tokens,
                        .cols = p.w.cols,
                        .block_begin = 0,
                        .block_end = p.w.cols / kernels::kMxBlock};
      values += p.w.cols;
    }
    rows[i] = jobs[inputs - 1].rows;
  }
  if (inputs == 0) return rows;
  const int64_t grain = RowGrain(kQuantizeCost * values / inputs);
  step.pool.ParallelFor(inputs * tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t input = begin / tokens; input * tokens < end; ++input) {
      kernels::QuantizeParams job = jobs[input];
      const int64_t first = std::max(begin - input * tokens, int64_t{0});
      job.tokens = std::min(end - input * tokens, tokens) - first;
      job.x += first * job.x_stride;
      job.rows += first * kernels::Int8RowBytes(job.cols);
      kernels::QuantizeRows(job);
    }
  });
  return rows;
}

}  // namespace

int64_t RowGrain(int64_t row_cost) {
  return std::max<int64_t>(1, kMinWork / std::max<int64_t>(1, row_cost));
}

void Project(const Step& step, int64_t tokens, std::span<const Projection> projections) {
  const Workspace::Scope scope(step.workspace);
  int64_t panels = 0, work = 0;
  for (const Projection& p : projections) {
    panels += p.w.panels();
    work += p.w.panels() * p.w.cols * kernels::kPanel * tokens;
  }
  if (panels == 0) return;
  const std::byte** quantized = QuantizeInputs(step, tokens, projections);
  step.pool.ParallelFor(panels, RowGrain(work / panels), [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // number of the projection's first panel
    for (size_t i = 0; i < projections.size(); ++i) {
      const Projection& p = projections[i];
      const int64_t b = std::max(begin, first) - first;
      const int64_t e = std::min(end, first + p.w.panels()) - first;
      if (b < e) {
        kernels::GemmOrInt8({.x = p.x,
                             .x_stride = p.x_stride,
                             .w = p.w,
                             .y = p.y,
                             .y_stride = p.y_stride,
                             .tokens = tokens,
                             .panel_begin = b,
                             .panel_end = e},
                            quantized[i]);
      }
      first += p.w.panels();
    }
  });
}

void Project(const Step& step, int64_t tokens, const float* x, const kernels::PackedMatrix& w,
             float* y) {
  const Projection one{x, w.cols, w, y, w.rows};
  Project(step, tokens, {&one, 1});
}

}  // namespace deltamesh
