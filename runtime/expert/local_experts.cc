#include "runtime/expert/local_experts.h"

#include <algorithm>
#include <cstring>

#include "kernels/gemm/int8_activations.h"
#include "kernels/moe/moe.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

// Groups are run in waves of about this many rows, which bounds the scratch; a group is never
// split, so its weights are read once.
constexpr int64_t kWaveRows = 1024;
// Multiply-adds worth a thread of their own.
constexpr int64_t kGrainMacs = 64 << 10;

// Multiply-adds that quantising one value takes as long as.
constexpr int64_t kQuantizeCost = 16;

template <typename T>
void Grow(std::vector<T>& v, int64_t count) {
  if (static_cast<int64_t>(v.size()) < count) v.resize(static_cast<size_t>(count));
}

}  // namespace

absl::StatusOr<uint64_t> LocalExperts::Start(const ExpertBatch& batch) {
  CHECK(batch.width == set_->width, "batch width %d, experts have %d", batch.width, set_->width);
  batch_rows_.resize(static_cast<size_t>(batch.tokens * batch.top_k));
  for (int64_t i = 0; i < batch.tokens * batch.top_k; ++i) {
    batch_rows_[static_cast<size_t>(i)] = {static_cast<int32_t>(i / batch.top_k), batch.ids[i]};
  }
  RETURN_IF_ERROR(Compute(batch.layer, batch_rows_, batch.x, batch.out));
  return next_ticket_++;
}

absl::Status LocalExperts::Finish(uint64_t ticket) {
  CHECK(ticket > 0 && ticket < next_ticket_, "ticket %d was never given", ticket);
  return absl::OkStatus();
}

absl::Status LocalExperts::Compute(int64_t layer, std::span<const ExpertRow> rows, const float* x,
                                   float* out) {
  RETURN_IF_ERROR(GroupRows(layer, rows));
  QuantizeInputs(layer, rows, x);
  const std::span<const Group> groups(groups_);
  for (size_t begin = 0; begin < groups.size();) {
    size_t end = begin + 1;
    while (end < groups.size() && groups[end].end - groups[begin].begin <= kWaveRows) ++end;
    RunWave(layer, groups.subspan(begin, end - begin), rows, x, out);
    begin = end;
  }
  return absl::OkStatus();
}

absl::Status LocalExperts::GroupRows(int64_t layer, std::span<const ExpertRow> rows) {
  CHECK(layer >= 0 && layer < static_cast<int64_t>(set_->layers.size()), "layer %d of %d", layer,
        set_->layers.size());
  const std::vector<ExpertWeights>& weights = set_->layers[static_cast<size_t>(layer)];
  CHECK(static_cast<int64_t>(weights.size()) == set_->experts, "layer %d is not an expert layer",
        layer);

  starts_.assign(static_cast<size_t>(set_->experts) + 1, 0);
  for (const ExpertRow& r : rows) {
    CHECK(r.expert >= 0 && r.expert < set_->experts, "expert %d of %d", r.expert, set_->experts);
    if (weights[static_cast<size_t>(r.expert)].gate.data == nullptr) {
      return Unavailable("expert %d of layer %d is not held here; send it to a shard that hosts it",
                         r.expert, layer);
    }
    ++starts_[static_cast<size_t>(r.expert) + 1];
  }
  groups_.clear();
  for (size_t e = 0; e < weights.size(); ++e) {
    const int64_t count = starts_[e + 1];
    starts_[e + 1] += starts_[e];
    if (count > 0) groups_.push_back({static_cast<int32_t>(e), starts_[e], starts_[e + 1]});
  }
  order_.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    order_[static_cast<size_t>(starts_[static_cast<size_t>(rows[i].expert)]++)] =
        static_cast<int64_t>(i);
  }
  return absl::OkStatus();
}

void LocalExperts::QuantizeInputs(int64_t layer, std::span<const ExpertRow> rows, const float* x) {
  narrow_in_ = narrow_mid_ = false;
  if (!set_->int8_activations || groups_.empty()) return;
  const std::vector<ExpertWeights>& weights = set_->layers[static_cast<size_t>(layer)];
  const ExpertWeights& one = weights[static_cast<size_t>(groups_.front().expert)];
  narrow_in_ = kernels::TakesInt8(one.gate.format);
  narrow_mid_ = kernels::TakesInt8(one.down.format);
  for (const Group& g : groups_) {
    const ExpertWeights& w = weights[static_cast<size_t>(g.expert)];
    CHECK(kernels::TakesInt8(w.gate.format) == narrow_in_ &&
              kernels::TakesInt8(w.up.format) == narrow_in_ &&
              kernels::TakesInt8(w.down.format) == narrow_mid_,
          "expert %d of layer %d has another width than the others", g.expert, layer);
  }
  if (!narrow_in_) return;
  int64_t inputs = 0;
  for (const ExpertRow& r : rows) inputs = std::max(inputs, int64_t{r.row} + 1);
  const int64_t width = set_->width, row_bytes = kernels::Int8RowBytes(width);
  Grow(x_codes_, inputs * row_bytes);
  const int64_t grain = std::max<int64_t>(1, kGrainMacs / (kQuantizeCost * width));
  pool_->ParallelFor(inputs, grain, [&](int64_t begin, int64_t end) {
    kernels::QuantizeRows({.x = x + begin * width,
                           .x_stride = width,
                           .rows = x_codes_.data() + begin * row_bytes,
                           .tokens = end - begin,
                           .cols = width,
                           .block_begin = 0,
                           .block_end = width / kernels::kMxBlock});
  });
}

template <typename Body>
void LocalExperts::ForPanels(std::span<const Group> wave, int64_t panels, int64_t panel_macs,
                             const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrainMacs / std::max<int64_t>(1, panel_macs));
  const int64_t items = static_cast<int64_t>(wave.size()) * panels;
  pool_->ParallelFor(items, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t group = begin / panels;
      const int64_t stop = std::min(end, (group + 1) * panels);
      body(wave[static_cast<size_t>(group)], begin - group * panels, stop - group * panels);
      begin = stop;
    }
  });
}

void LocalExperts::RunWave(int64_t layer, std::span<const Group> wave,
                           std::span<const ExpertRow> rows, const float* x, float* out) {
  const std::vector<ExpertWeights>& weights = set_->layers[static_cast<size_t>(layer)];
  const int64_t width = set_->width, inter = set_->inter;
  const int64_t first = wave.front().begin, count = wave.back().end - first;
  const int64_t mean_rows =
      (count + static_cast<int64_t>(wave.size()) - 1) / static_cast<int64_t>(wave.size());
  const int64_t panel_macs = mean_rows * width * kernels::kPanel;
  const int64_t in_bytes = narrow_in_ ? kernels::Int8RowBytes(width) : 0;
  const int64_t mid_bytes = narrow_mid_ ? kernels::Int8RowBytes(inter) : 0;
  Grow(in_, narrow_in_ ? 0 : count * width);
  Grow(in_codes_, count * in_bytes);
  Grow(mid_codes_, count * mid_bytes);
  Grow(gate_, count * inter);
  Grow(up_, count * inter);
  Grow(out_, count * width);

  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = rows[static_cast<size_t>(order_[static_cast<size_t>(first + i)])].row;
    if (narrow_in_) {
      std::memcpy(in_codes_.data() + i * in_bytes, x_codes_.data() + row * in_bytes,
                  static_cast<size_t>(in_bytes));
    } else {
      std::memcpy(&in_[static_cast<size_t>(i * width)], x + row * width,
                  static_cast<size_t>(width) * sizeof(float));
    }
  }

  // The activation is element-wise, and what is quantised together is in one panel, so each piece of panels
  // does both to its own columns.
  static_assert(kernels::kPanel == kernels::kMxBlock);
  const int64_t inter_panels = (inter + kernels::kPanel - 1) / kernels::kPanel;
  ForPanels(wave, inter_panels, 2 * panel_macs, [&](const Group& g, int64_t p0, int64_t p1) {
    const ExpertWeights& w = weights[static_cast<size_t>(g.expert)];
    const int64_t at = g.begin - first, n = g.end - g.begin;
    float* gate = gate_.data() + at * inter;
    float* up = up_.data() + at * inter;
    const float* input = narrow_in_ ? nullptr : in_.data() + at * width;
    const std::byte* codes = narrow_in_ ? in_codes_.data() + at * in_bytes : nullptr;
    for (const auto& [matrix, y] : {std::pair(&w.gate, gate), std::pair(&w.up, up)}) {
      kernels::GemmOrInt8({.x = input,
                           .x_stride = width,
                           .w = *matrix,
                           .y = y,
                           .y_stride = inter,
                           .tokens = n,
                           .panel_begin = p0,
                           .panel_end = p1},
                          codes);
    }
    const int64_t c0 = p0 * kernels::kPanel, c1 = std::min(inter, p1 * kernels::kPanel);
    kernels::Glu({.gate = gate + c0,
                  .up = up + c0,
                  .stride = inter,
                  .activation = set_->activation,
                  .beta = set_->beta,
                  .linear_beta = set_->linear_beta,
                  .y = gate + c0,
                  .y_stride = inter,
                  .rows = n,
                  .width = c1 - c0});
    if (!narrow_mid_) return;
    kernels::QuantizeRows({.x = gate,
                           .x_stride = inter,
                           .rows = mid_codes_.data() + at * mid_bytes,
                           .tokens = n,
                           .cols = inter,
                           .block_begin = p0,
                           .block_end = p1});
  });

  const int64_t width_panels = (width + kernels::kPanel - 1) / kernels::kPanel;
  ForPanels(wave, width_panels, panel_macs * inter / std::max<int64_t>(1, width),
            [&](const Group& g, int64_t p0, int64_t p1) {
              const int64_t at = g.begin - first;
              kernels::GemmOrInt8({.x = gate_.data() + at * inter,
                                   .x_stride = inter,
                                   .w = weights[static_cast<size_t>(g.expert)].down,
                                   .y = out_.data() + at * width,
                                   .y_stride = width,
                                   .tokens = g.end - g.begin,
                                   .panel_begin = p0,
                                   .panel_end = p1},
                                  narrow_mid_ ? mid_codes_.data() + at * mid_bytes : nullptr);
            });

  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(out + order_[static_cast<size_t>(first + i)] * width,
                &out_[static_cast<size_t>(i * width)], static_cast<size_t>(width) * sizeof(float));
  }
}

}  // namespace deltamesh
